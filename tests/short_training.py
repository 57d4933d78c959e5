"""The command line with fewer gradient steps by default, for `prune --effort best` on small models."""

from sparsellm.cli.app import app
from sparsellm.extensions.recover.recipe import SCOPE_STEPS

SCOPE_STEPS["model"] = 100

if __name__ == "__main__":
    app()
