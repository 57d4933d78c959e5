"""python -m sparsellm"""

from sparsellm.cli.app import main

if __name__ == "__main__":
    main()
