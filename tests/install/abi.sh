#!/bin/sh
# The ABI is the one that frugal.abi describes: functions with their types, structs, enums and constants.
#   tests/install/abi.sh           compares; what differs is told, and the exit status is 1
#   tests/install/abi.sh --renew   writes the description; the change is then seen in its diff
# Needs abigail-tools, and gcc whatever builds the library: compilers tell debug information differently.
#
# Described is lib/capi/frugal.cpp, where every exported function is defined, compiled with debug
# information and linked alone, so that no other part of the library, no CUDA and no build option gets
# into the description; tests/symbols.sh sees to it that the library exports the same names. No function
# takes an enum as such, and macros are no part of debug information: a variable of each enum, and an
# enum for each constant, carry them into the description.
set -eu
cd "$(dirname "$0")/../.."
stored=tests/install/frugal.abi
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT

# The probe of enums and constants, made from the header.
header=include/frugal.h
enums=$(sed -n 's/^typedef enum \([a-z_]*\) {.*/\1/p' $header)
macros=$(sed -n 's/^#define \(FRUGAL_[A-Z0-9_]*\) .*/\1/p' $header | grep -v '_INIT$\|^FRUGAL_API$\|_VERSION_')
[ "$(echo "$enums" | wc -l)" = "$(grep -c '\benum\b.*{' $header)" ] ||
  { echo "an enum of frugal.h is not of the form \"typedef enum name {\"" >&2; exit 1; }
{
  echo '#include "frugal.h"'
  for name in $enums; do echo "enum $name frugal_abi_$name;"; done
  for name in $macros; do
    # One enum each: abidiff takes two names of one value for the same enumerator.
    echo "enum constant_$name { value_of_$name = (int64_t)$name } frugal_abi_$name;"
  done
} > "$work/probe.c"

gcc -std=gnu99 -g -O0 -fPIC -Iinclude -c "$work/probe.c" -o "$work/probe.o"
g++ -std=c++20 -g -O0 -fPIC -fvisibility=hidden -Iinclude -Ilib -c lib/capi/frugal.cpp -o "$work/capi.o"
g++ -shared -Wl,--version-script=cmake/frugal.map "$work/capi.o" "$work/probe.o" -o "$work/libfrugal.so"
abidw --exported-interfaces-only --no-show-locs --no-corpus-path --no-comp-dir-path --no-elf-needed \
  --no-architecture --type-id-style hash "$work/libfrugal.so" |
  sed "s,path='[^']*/,path=',; s/ language='[^']*'//" > "$work/now.abi"

functions=$(grep -c "<elf-symbol name='frugal_[a-z_]*' type='func-type'" "$work/now.abi" || true)
if [ "$functions" != "$(wc -l < tests/symbols.txt)" ]; then
  echo "$functions functions are described, and tests/symbols.txt has $(wc -l < tests/symbols.txt)" >&2
  exit 1
fi
if [ "${1:-}" = --renew ]; then
  cp "$work/now.abi" "$stored"
  exit 0
fi
if ! abidiff --harmless "$stored" "$work/now.abi"; then
  echo "the ABI is not that of $stored; tests/install/abi.sh --renew takes the new one" >&2
  exit 1
fi
echo "$functions functions, $(echo "$enums" | wc -l) enums, $(echo "$macros" | wc -l) constants: the ABI of $stored"
