#!/bin/sh
# The library exports exactly the functions of frugal.h, and tests/symbols.txt lists them. It wants no static
# thread-local storage, of which little is left where a program, as Python with PyTorch, loads it late. And no
# thread-local object of it has a destructor: the C library ends the program where there is no memory to register one.
#   tests/symbols.sh LIBRARY          compares all three
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
if readelf -dW "$1" | grep -q STATIC_TLS; then
  echo "the library wants static thread-local storage (STATIC_TLS): which object uses initial-exec?" >&2
  exit 1
fi
if nm -D --undefined-only "$1" | grep -q __cxa_thread_atexit; then
  echo "the library has a thread_local object with a destructor (it wants __cxa_thread_atexit)" >&2
  exit 1
fi
echo "$(wc -l < "$here/symbols.txt") exported symbols, as declared"
