#!/usr/bin/env bash
# Builds the wheel twice, from two copies of the committed tree in different folders, and compares.
# Usage: tools/reproducible.sh PYTHON STATIC_OPENSSL_PREFIX
set -euo pipefail
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
openssl=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export SOURCE_DATE_EPOCH
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
for copy in first/here second/a-longer-path/there; do
  mkdir -p "$work/$copy"
  git archive HEAD | tar -x -C "$work/$copy"
  "$python" -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --no-cache-dir \
    --config-settings=cmake.define.SEALRING_STATIC_OPENSSL="$openssl" --wheel-dir "$work/$copy/dist" "$work/$copy"
  (cd "$work/$copy/dist" && sha256sum ./*.whl)
done
cmp "$work"/first/here/dist/*.whl "$work"/second/a-longer-path/there/dist/*.whl
echo "both builds are the same, byte by byte"
