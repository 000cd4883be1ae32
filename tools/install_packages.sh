#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what building nibble needs from the distribution's packages (Debian bookworm, Ubuntu 24.04). Says what
# it installs, and uses sudo only when it is not run as root.
#   tools/install_packages.sh [more packages…]
set -euo pipefail

if ! command -v apt-get >/dev/null; then
  echo "nibble: no apt-get here; install CMake 3.25, Ninja, a C++20 compiler, Boost 1.81 with Boost.JSON, fmt," >&2
  echo "        CLI11, Highway, utf8proc and Catch2, then follow 'Building by hand' in README.md" >&2
  exit 2
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  as_root=(sudo)
fi

wanted=(cmake ninja-build g++ libfmt-dev libcli11-dev libhwy-dev libutf8proc-dev "$@")
# Bookworm has Boost 1.81 beside its default 1.74; Ubuntu 24.04's default is 1.83.
. /etc/os-release
if [ "${VERSION_CODENAME:-}" = bookworm ]; then
  wanted+=(libboost1.81-dev libboost-json1.81-dev)
else
  wanted+=(libboost-dev libboost-json-dev)
fi

missing=()
for package in "${wanted[@]}"; do
  status=$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null || true)
  [ "$status" = "install ok installed" ] || missing+=("$package")
done
if [ "${#missing[@]}" -eq 0 ]; then
  exit 0
fi
echo "nibble: installing ${missing[*]}"
if [ "${#as_root[@]}" -gt 0 ] && ! command -v sudo >/dev/null; then
  echo "nibble: not root and there is no sudo; ask an administrator to install them" >&2
  exit 2
fi
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
