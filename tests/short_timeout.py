"""The command line with collectives that wait for 20 seconds at most: `python -m tests.short_timeout WORDS`."""

from __future__ import annotations

from datetime import timedelta

from sparsellm.cli.app import main
from sparsellm.runtime import process_group

process_group.TIMEOUT = timedelta(seconds=20)

if __name__ == "__main__":
    main()
