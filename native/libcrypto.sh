#!/bin/sh
# native/libcrypto.sh FOLDER: a static libcrypto in FOLDER, where it makes sealing faster.
# native/libcrypto.sh FOLDER pinned: always one, of the release that native/openssl.pin names. For wheels.
#
# OpenSSL 3.1 was the first to compute AES-256-GCM with VAES and AVX-512. Where the CPU has these and
# the system's OpenSSL is older, this builds the libcrypto of Debian's next release from its source,
# which apt fetches from where this machine gets its packages, and authenticates.
#
# FOLDER/prefix then says where it is. It is empty where the system's OpenSSL is to be linked: because it
# will do, or because no other is available here. One line says which, and neither is an error.
# With "pinned" there is no such choice: a wheel that is not built as the pin says is an error.
set -u
umask 022
folder=$(mkdir -p "$1" && cd "$1" && pwd) || exit 1
here=$(cd "$(dirname "$0")" && pwd)
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

# build VERSION: the source in the current folder becomes FOLDER/lib and FOLDER/include.
# Nothing of it is looked for at run time: no configuration, no modules, no engines.
build() {
  echo "libcrypto: building OpenSSL $1, once"
  unset MAKEFLAGS MAKELEVEL MFLAGS
  {
    CFLAGS='-O2 -fstack-protector-strong' CPPFLAGS=-D_FORTIFY_SOURCE=2 \
      ./Configure no-shared no-module no-engine no-legacy no-autoload-config no-apps no-docs no-tests \
      no-makedepend --prefix=/nonexistent --openssldir=/nonexistent &&
      make -s -j"$(nproc)" build_generated libcrypto.a
  } >>"$log" 2>&1 || return 1
  rm -rf "$folder/lib" "$folder/include"
  mkdir -p "$folder/lib" "$folder/include/openssl"
  cp include/openssl/*.h "$folder/include/openssl" &&
    echo "$1" >"$folder/version" &&
    cp libcrypto.a "$folder/lib" || exit 1
}

# The addresses from which this machine's apt takes the packages of its release, one a line: "PLACE SUITE".
debian_sources() {
  apt-get update --print-uris -o Dir::State="$work/none" 2>>"$log" |
    sed -n "s|^'\(.*\)/dists/$release\([^/]*\)/InRelease'.*|\1 \2|p"
}

refuse() {
  rm -rf "$work"
  echo "libcrypto: $1" >&2
  exit 1
}

# The release's own archive, from its project or from a mirror of Debian, which keeps it unchanged.
# The pinned SHA-256 alone decides whether it is used.
pinned() {
  version=$(sed -n 's/^version=//p' "$here/openssl.pin")
  digest=$(sed -n 's/^sha256=//p' "$here/openssl.pin")
  [ -f "$folder/lib/libcrypto.a" ] && [ "$digest" = "$(cat "$folder/sha256" 2>/dev/null)" ] &&
    settle "$folder" "OpenSSL $version, built before"
  for tool in curl sha256sum tar perl make; do
    command -v $tool >/dev/null || refuse "building OpenSSL $version needs $tool"
  done
  rm -rf "$work"
  mkdir -p "$work/none" "$work/source"
  : >"$log"
  {
    echo "https://github.com/openssl/openssl/releases/download/openssl-$version/openssl-$version.tar.gz"
    command -v apt-get >/dev/null && debian_sources | while read -r place _; do
      echo "$place/pool/main/o/openssl/openssl_$version.orig.tar.gz"
    done
  } >"$work/addresses"
  while read -r address; do
    curl --fail --silent --show-error --location --connect-timeout 10 --max-time 300 \
      --output "$work/openssl.tar.gz" "$address" 2>>"$log" || continue
    echo "$digest  $work/openssl.tar.gz" | sha256sum --check --status 2>>"$log" && break
    echo "libcrypto: $address is not the pinned file" >&2
    rm -f "$work/openssl.tar.gz"
  done <"$work/addresses"
  [ -f "$work/openssl.tar.gz" ] ||
    refuse "no source of OpenSSL $version has the SHA-256 of native/openssl.pin ($log)"
  tar -xzf "$work/openssl.tar.gz" -C "$work/source" --strip-components=1 || exit 1
  cd "$work/source" || exit 1
  # OpenSSL writes the time of its build into itself; the release's time makes builds alike.
  SOURCE_DATE_EPOCH=$(stat -c %Y VERSION.dat) && export SOURCE_DATE_EPOCH
  build "$version" || refuse "the build failed ($log)"
  echo "$digest" >"$folder/sha256"
  settle "$folder" "OpenSSL $version, built in"
}

release=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
[ "${2:-}" != pinned ] || pinned

for feature in vaes vpclmulqdq avx512f avx512dq avx512bw avx512vl; do
  grep -qw "$feature" /proc/cpuinfo || settle "" "the system's OpenSSL"
done
system=$(printf '#include <openssl/opensslv.h>\nOPENSSL_VERSION_MAJOR.OPENSSL_VERSION_MINOR\n' |
  ${CC:-cc} -E -P - 2>/dev/null | tail -n 1 | tr -d ' ')
[ "$system" = 3.0 ] || settle "" "the system's OpenSSL"

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
debian_sources | while read -r place suite; do
  echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $place $next$suite main"
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

build "$version" || without "the build failed ($log)"
settle "$folder" "OpenSSL $version, built in"
