#!/usr/bin/env bash
# The tests of the core in an installation without the folder of extensions and their entry points. Arguments are those of pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
cp -r src/sparsellm "$site"
rm -r "$site/sparsellm/extensions"
mkdir "$site/sparsellm-0.dist-info"
version=$(python -c "from importlib.metadata import version; print(version('sparsellm'))")
printf 'Metadata-Version: 2.1\nName: sparsellm\nVersion: %s\n' "$version" > "$site/sparsellm-0.dist-info/METADATA"
PYTHONPATH=$site pytest --numprocesses logical --maxprocesses 8 --dist worksteal tests/core "$@"
