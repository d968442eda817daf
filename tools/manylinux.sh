#!/bin/sh
# Builds what is published, as root inside a manylinux image whose working folder is the checkout:
#   docker run --rm --volume "$PWD:/project" --workdir /project IMAGE tools/manylinux.sh
# .github/workflows/wheels.yml names the images by digest. Python's packages come by the hashes of
# requirements.lock, and OpenSSL by that of native/openssl.pin.
set -eu
dnf install --assumeyes --quiet perl-core # OpenSSL's Configure; dnf checks the distribution's signature
git config --global --add safe.directory "$PWD" # the checkout is another user's
exec /opt/python/cp311-cp311/bin/python tools/wheels.py
