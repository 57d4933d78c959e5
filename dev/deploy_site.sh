#!/usr/bin/env bash
# The site of one version on the branch gh-pages, by mike: bash dev/deploy_site.sh main|vX.Y.Z [--push]
#
# main becomes `dev`; a tag vX.Y.Z becomes X.Y, which `latest` and the root then lead to, and its 404 page becomes that of the host.
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in
  main) mike deploy dev ;;
  v[0-9]*.[0-9]*)
    version=$(echo "$1" | sed -n 's/^v\([0-9]*\.[0-9]*\).*/\1/p')
    mike deploy --update-aliases "$version" latest
    mike set-default latest
    page=$(git rev-parse "gh-pages:$version/404.html")
    index=$(mktemp -d)
    trap 'rm -rf "$index"' EXIT
    export GIT_INDEX_FILE="$index/index"
    git read-tree gh-pages
    git update-index --add --cacheinfo "100644,$page,404.html"
    git update-ref refs/heads/gh-pages "$(git commit-tree "$(git write-tree)" -p gh-pages -m "The 404 page of $version")"
    ;;
  *) sed -n 2p "$0" >&2 && exit 2 ;;
esac
if [ "${2:-}" = --push ]; then git push origin gh-pages; fi
