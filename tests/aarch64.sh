#!/usr/bin/env bash
# tests/aarch64.sh [RECORD_OPTION...]
# Builds the library for AArch64 and compares its bits with the record (tests/record/).
#
# Packages of Debian's arm64 go into build/aarch64/root, with package lists of their own, so the
# machine's packages do not change. qemu-aarch64 emulates one process well, but not several that
# share memory, so this leaves out the record's lines of several processes. It cannot show AArch64's
# memory order: qemu's host is stricter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=$PWD/build/aarch64
root=$build/root

fetch_root() {
  local apt=$build/apt deb program
  rm -rf "$root" "$apt"
  mkdir -p "$root/usr/bin" "$apt"/{state/lists,cache/archives}/partial
  : >"$apt/status"
  local options=(-o APT::Architecture=arm64 -o APT::Architectures=arm64
    -o APT::Install-Recommends=false -o APT::Sandbox::User=root -o "Dir::State=$apt/state"
    -o "Dir::State::status=$apt/status" -o "Dir::Cache=$apt/cache")
  apt-get "${options[@]}" update
  apt-get "${options[@]}" install --download-only -y libc6-dev libstdc++-12-dev libcapnp-dev \
    libxxhash-dev libjansson-dev nlohmann-json3-dev libgtest-dev
  for deb in "$apt"/cache/archives/*.deb; do dpkg -x "$deb" "$root"; done
  # The build runs this machine's programs.
  for program in capnp capnpc-c++ capnpc-capnp; do
    ln -s "$(command -v "$program")" "$root/usr/bin/$program"
  done
  rm -rf "$apt"
}

[ -e "$root/usr/include/xxhash.h" ] || fetch_root
cmake -G Ninja -S . -B "$build" --toolchain "$PWD/cmake/aarch64.cmake" -DCMAKE_SYSROOT="$root" \
  -DFRUGAL_CUDA=OFF -DFRUGAL_PROCESSES=ON -DFRUGAL_EXAMPLES=OFF -DFRUGAL_BENCH=OFF
cmake --build "$build" \
  --target frugal_with_sim oracle opscript_c opscript_maker record_demo frugal-controller
python3 tests/record/record.py "$build" --qemu "$root" "$@"
