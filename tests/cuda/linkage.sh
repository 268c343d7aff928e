#!/bin/sh
# The library loads without a driver and without CUDA's libraries: it needs none of them, and has no
# undefined function of theirs.
#   linkage.sh LIBRARY
set -eu
needed=$(readelf -dW "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
wanted=$(nm -D --undefined-only "$1" | awk '{ print $NF }')
[ -n "$needed" ] && [ -n "$wanted" ] || { echo "$1: cannot be read" >&2; exit 1; }
if echo "$needed" | grep -i -E '^lib(cuda|cudart|nv)'; then
  echo "$1 needs these libraries" >&2
  exit 1
fi
if echo "$wanted" | grep -E '^(__)?(cu|cuda)[A-Z]'; then
  echo "$1 has these functions undefined" >&2
  exit 1
fi
# Without this name the library has no CUDA, and this test has shown nothing.
strings -a "$1" | grep -q '^libcuda\.so' || { echo "$1 does not load a driver" >&2; exit 1; }
echo "$needed" | tr '\n' ' '
