#!/bin/sh
# The library exports exactly the functions of frugal.h, and tests/symbols.txt lists them. It has
# nothing of tests/sim, which only tests are linked with.
#
# It has no thread-local objects. A program that loads it late, as Python with PyTorch does, has
# little static thread-local storage left. For other objects, and to register a destructor, the
# loader allocates memory, and it ends the program if there is none. The CUDA run-time library has
# one thread-local object of its own, which its first call in a thread uses.
#
# No variable is initialized by the first call, under the C++ library's lock (tests/statics.sh). The
# launchers of kernels have some that nvcc makes (__device_stub__).
#
# The library keeps data of threads and needs its code when they end, so it is never unloaded.
#
#   tests/symbols.sh LIBRARY          compares them
#   tests/symbols.sh --update         writes tests/symbols.txt from frugal.h
set -eu
here=$(cd "$(dirname "$0")" && pwd)

# Comments go; a declaration may span lines, so the text becomes one line, cut at semicolons.
declared() {
  sed 's,/\*[^*]*\*/,,g' "$here/../include/frugal.h" | tr '\n' ' ' |
    sed 's,/\*\([^*]\|\*[^/]\)*\*\+/,,g' | tr ';' '\n' |
    sed -n 's/.*FRUGAL_API [^(]*\(frugal_[a-z0-9_]*\)(.*/\1/p' | LC_ALL=C sort
}

if [ "${1:-}" = --update ]; then
  declared > "$here/symbols.txt"
  exit 0
fi
exported=$(nm -D --defined-only "$1" | awk '$2 ~ /[A-Z]/ { sub(/@.*/, "", $3); print $3 }' |
  LC_ALL=C sort)
if [ "$(declared)" != "$(cat "$here/symbols.txt")" ]; then
  echo "frugal.h and tests/symbols.txt differ; tests/symbols.sh --update writes the list" >&2
  declared | diff "$here/symbols.txt" - >&2 || true
  exit 1
fi
if [ "$exported" != "$(cat "$here/symbols.txt")" ]; then
  echo "the library's exports (>) are not those of tests/symbols.txt (<)" >&2
  echo "$exported" | diff "$here/symbols.txt" - >&2 || true
  exit 1
fi
if nm -C "$1" | grep -q 'frugal::device::sim::'; then
  echo "the library has a part of tests/sim, the simulated GPU" >&2
  exit 1
fi
objects=$(readelf -sW "$1" | awk '$4 == "TLS" { print $8 }')
if own=$(echo "$objects" | grep -v '^libcudart' | grep .); then
  echo "the library has thread-local objects" \
    "(lib/base/this_thread.h has room for what threads need):" >&2
  echo "$own" | c++filt >&2
  exit 1
fi
if [ -z "$objects" ] && readelf -lW "$1" | grep -q '^ *TLS '; then
  echo "the library has thread-local storage, and no names of what lies there" >&2
  exit 1
fi
if guarded=$(nm -C "$1" | sed -n 's/.* guard variable for //p' |
  grep -v '^__device_stub__'); then
  echo "a child that is forked while another thread first uses these would wait for ever" \
    "(lib/base/immortal.h has another way):" >&2
  echo "$guarded" >&2
  exit 1
fi
if ! readelf -dW "$1" | grep -q NODELETE; then
  echo "the library may be unloaded (not NODELETE)" \
    "before the threads end that it keeps something of" >&2
  exit 1
fi
if readelf -dW "$1" | grep -q STATIC_TLS; then
  echo "the library wants static thread-local storage (STATIC_TLS):" \
    "which object uses initial-exec?" >&2
  exit 1
fi
if nm -D --undefined-only "$1" | grep -q __cxa_thread_atexit; then
  echo "the library has a thread_local object with a destructor (it wants __cxa_thread_atexit)" >&2
  exit 1
fi
echo "$(wc -l < "$here/symbols.txt") exported symbols, as declared"
