#!/usr/bin/env bash
# The tests with the instructions of an older processor: bash dev/as_processor.sh avx2|sse4 [arguments of pytest]
#
# A copy of the tree is compiled and run, since another instruction set rounds differently in torch, oneDNN, MKL and the kernels here.
set -euo pipefail
case "${1:-}" in
  avx2) export CFLAGS=-DSPARSELLM_NARROW ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 ;;
  sse4) export CFLAGS=-DSPARSELLM_PORTABLE ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 ;;
  *) sed -n 2p "$0" >&2 && exit 2 ;;
esac
shift
cd "$(dirname "$0")/.."
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
mkdir "$copy/tree"
git ls-files -z --cached --others --exclude-standard | tar --null --files-from=- -cf - | tar -xf - -C "$copy/tree"
[ ! -d ../shared ] || ln -s "$(realpath ../shared)" "$copy/shared"
cd "$copy/tree"
python hatch_build.py
export PYTHONPATH=$PWD/src
python -c 'import sys; from sparsellm.extensions.packed.formats import kernels; sys.exit(not kernels.instruction_sets() and "the kernels are missing")'
pytest "$@"
