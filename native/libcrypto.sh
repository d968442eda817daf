#!/bin/sh
# native/libcrypto.sh FOLDER: a static libcrypto in FOLDER, where it makes sealing faster.
#
# OpenSSL 3.1 was the first to compute AES-256-GCM with VAES and AVX-512. Where the CPU has these and
# the system's OpenSSL is older, this builds the libcrypto of Debian's next release from its source,
# which apt fetches from where this machine gets its packages, and authenticates.
#
# FOLDER/prefix then says where it is. It is empty where the system's OpenSSL is to be linked: because it
# will do, or because no other is available here. One line says which, and neither is an error.
set -u
umask 022
folder=$(mkdir -p "$1" && cd "$1" && pwd) || exit 1
work=$folder/work
log=$folder/log

settle() {
  rm -rf "$work"
  echo "$1" >"$folder/prefix"
  echo "libcrypto: $2"
  exit 0
}

without() {
  [ ! -f "$folder/lib/libcrypto.a" ] ||
    settle "$folder" "OpenSSL $(cat "$folder/version"), built before; looking for a newer one: $1"
  settle "" "the system's OpenSSL, which does not use this CPU's VAES: $1"
}

for feature in vaes vpclmulqdq avx512f avx512dq avx512bw avx512vl; do
  grep -qw "$feature" /proc/cpuinfo || settle "" "the system's OpenSSL"
done
system=$(printf '#include <openssl/opensslv.h>\nOPENSSL_VERSION_MAJOR.OPENSSL_VERSION_MINOR\n' |
  ${CC:-cc} -E -P - 2>/dev/null | tail -n 1 | tr -d ' ')
[ "$system" = 3.0 ] || settle "" "the system's OpenSSL"

release=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
[ "$release" = bookworm ] || without "a newer one is fetched on Debian 12 only"
next=trixie
for tool in apt-get dpkg-source perl make; do
  command -v $tool >/dev/null || without "there is no $tool here"
done

# apt with lists of its own: the system's are neither read nor changed, and it needs no root. What is
# not signed is refused, whatever the system's settings allow.
apt() {
  tool=$1
  shift
  timeout 120 "$tool" -q -o Dir::State="$work/state" -o Dir::Cache="$work/cache" \
    -o Dir::Etc::SourceParts=/dev/null -o Dir::Etc::SourceList="$work/sources.list" \
    -o Acquire::AllowInsecureRepositories=false -o APT::Get::AllowUnauthenticated=false \
    -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 -o Acquire::Retries=1 "$@" 2>>"$log"
}

rm -rf "$work"
mkdir -p "$work/none" "$work/source" "$work/state/lists/partial" "$work/cache/archives/partial"
: >"$log"
# The machine's own sources one release on, whatever they are, as long as Debian's keys sign them.
apt-get update --print-uris -o Dir::State="$work/none" 2>>"$log" |
  sed -n "s|^'\(.*\)/dists/$release\([^/]*\)/InRelease'.*|\1 $next\2|p" |
  while read -r place suite; do
    echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $place $suite main"
  done >"$work/sources.list"
[ -s "$work/sources.list" ] || without "apt has no source of Debian's packages"
apt apt-get update >>"$log"

# The newest that is there: a mirror may have heard of one that it does not hold yet.
cd "$work/source" || exit 1
versions=$(apt apt-cache showsrc --only-source openssl | sed -n 's/^Version: //p' | sort -urV)
for version in $versions; do
  [ -f "$folder/lib/libcrypto.a" ] && [ "$version" = "$(cat "$folder/version")" ] &&
    settle "$folder" "OpenSSL $version, built before"
  apt apt-get source --only-source "openssl=$version" >>"$log" && break
done
cd openssl-*/ 2>/dev/null || without "no source could be fetched ($log)"

# Nothing of it is looked for at run time: no configuration, no modules, no engines.
echo "libcrypto: building OpenSSL $version, once"
unset MAKEFLAGS MAKELEVEL MFLAGS
{
  CFLAGS='-O2 -fstack-protector-strong' CPPFLAGS=-D_FORTIFY_SOURCE=2 \
    ./Configure no-shared no-module no-engine no-legacy no-autoload-config no-apps no-docs no-tests \
    no-makedepend --prefix=/nonexistent --openssldir=/nonexistent &&
    make -s -j"$(nproc)" build_generated libcrypto.a
} >>"$log" 2>&1 || without "the build failed ($log)"
rm -rf "$folder/lib" "$folder/include"
mkdir -p "$folder/lib" "$folder/include/openssl"
{
  cp include/openssl/*.h "$folder/include/openssl" &&
    echo "$version" >"$folder/version" &&
    cp libcrypto.a "$folder/lib"
} || exit 1
settle "$folder" "OpenSSL $version, built in"
