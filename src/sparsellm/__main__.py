"""python -m sparsellm"""

from sparsellm.cli import main

if __name__ == "__main__":
    main()
