#!/usr/bin/env bash
# Everything that must pass before a commit: lint, format, types, the documentation, and the tests with their coverage.
# The tests marked `long` are left to `.ci/run`.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
mypy
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
NO_MKDOCS_2_WARNING=1 mkdocs build --strict --site-dir "$site"
# One process for each core, each with one thread: the tests' models are too small for more.
OMP_NUM_THREADS=1 pytest --numprocesses logical --maxprocesses 8 --dist worksteal -m "not long" --durations=25 --cov --cov-report=term "$@"
