#!/usr/bin/env bash
# Everything that must pass before a commit: lint, format, types, and the tests with their coverage.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
mypy
pytest --cov --cov-report=term "$@"
