#!/usr/bin/env bash
# Everything that must pass before a commit: lint, format, types, and the tests, one of which builds the documentation. Those of the core
# run without the extensions, the others with them.
# The tests marked `long` are left to `.ci/run`.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
types=$(mktemp)
trap 'rm -f "$types"' EXIT
mypy > "$types" 2>&1 &
mypy=$!
failed=0
bash tests/core_alone.sh --durations=10 || failed=1
pytest --numprocesses logical --maxprocesses 8 --dist worksteal --durations=25 -m "not core and not long" || failed=1
wait "$mypy" || failed=1
cat "$types"
exit "$failed"
