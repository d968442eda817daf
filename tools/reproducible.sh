#!/usr/bin/env bash
# Builds the source distribution and the wheels twice, from two clones in different folders, and compares.
# Usage: [KEEP=FOLDER] [CACHE=FOLDER] tools/reproducible.sh PYTHON_OF_THE_TOOLS [PYTHON_TO_BUILD_WITH...]
# KEEP: where the files go, if they are alike. CACHE: OpenSSL, whose source is pinned, and the locked build
# tools. These are made once and not compared.
set -euo pipefail
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
shift
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for copy in first/here second/a-longer-path/there; do
  mkdir -p "$(dirname "$work/$copy")"
  git clone --quiet --no-hardlinks "$root" "$work/$copy"
  "$python" "$work/$copy/tools/wheels.py" --cache "${CACHE:-$root/build/wheels}" "${@/#/--python=}"
done
cmp "$work"/first/here/dist/SHA256SUMS "$work"/second/a-longer-path/there/dist/SHA256SUMS
echo "both builds are the same, byte by byte"
if [ -n "${KEEP:-}" ]; then
  mkdir -p "$KEEP"
  rm -f "$KEEP"/sealring[-.]* "$KEEP"/SHA256SUMS
  cp "$work"/first/here/dist/* "$KEEP"
fi
