#!/bin/sh
# The ABI is the one that frugal.abi and frugal.constants describe: functions with their types,
# structs and enums; constants and the values of the _INIT macros.
#   tests/install/abi.sh           prints each difference; if there is one, the exit status is 1
#   tests/install/abi.sh --renew   writes the descriptions; their diff then shows the change
# Needs abigail-tools. Needs gcc, whichever compiler builds the library: compilers write different
# debug information.
#
# The description is made from lib/capi/frugal.cpp, which defines every exported function. It is
# compiled with debug information and linked alone. So no other part of the library, no CUDA and no
# build option gets into the description. tests/symbols.sh checks that the library exports the same
# names.
#
# No function has a parameter of an enum type, so a variable of each enum adds the enums to the
# description. Debug information has no macros, so a program prints them: a constant with its size
# in bytes, sign and value, and a struct as its bytes in memory.
set -eu
cd "$(dirname "$0")/../.."
stored=tests/install/frugal.abi
stored_constants=tests/install/frugal.constants
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT

# The probe of enums and the program that prints macros, made from the header.
header=include/frugal.h
enums=$(sed -n 's/^typedef enum \([a-z_]*\) {.*/\1/p' $header)
inits=$(sed -n 's/^#define FRUGAL_\([A-Z0-9_]*\)_INIT .*/\1/p' $header)
constants=$(sed -n 's/^#define \(FRUGAL_[A-Z0-9_]*\) .*/\1/p' $header |
  grep -v '_INIT$\|^FRUGAL_API$\|_VERSION_')
[ "$(echo "$enums" | wc -l)" = "$(grep -c '\benum\b.*{' $header)" ] ||
  { echo "an enum of frugal.h is not of the form \"typedef enum name {\"" >&2; exit 1; }
{
  echo '#include "frugal.h"'
  for name in $enums; do echo "enum $name frugal_abi_$name;"; done
} > "$work/probe.c"
{
  cat <<'EOT'
# include "frugal.h"
# include <inttypes.h>
# include <stdio.h>

static void print_bytes(const char *name, const void *object, size_t size) {
  printf("%s %zu bytes:", name, size);
  for (size_t i = 0; i < size; ++i)
    printf("%s%02x", i % 4 == 0 ? " " : "", ((const unsigned char *)object)[i]);
  printf("\n");
}
# define CONSTANT(name)                                               \
  printf((__typeof__(name))-1 < 0 ? "%s %zu signed %" PRId64 "\n"    \
                                  : "%s %zu unsigned %" PRIu64 "\n", \
         # name, sizeof(name), (uint64_t)name);

EOT
  for name in $inits; do
    echo "static const frugal_$(echo "$name" | tr A-Z a-z) of_$name = FRUGAL_${name}_INIT;"
  done
  echo 'int main(void) {'
  for name in $constants; do echo "  CONSTANT($name)"; done
  for name in $inits; do
    echo "  print_bytes(\"FRUGAL_${name}_INIT\", &of_$name, sizeof(of_$name));"
  done
  echo '  return 0;' && echo '}'
} > "$work/constants.c"

gcc -std=gnu99 -g -O0 -fPIC -Iinclude -c "$work/probe.c" -o "$work/probe.o"
gcc -std=gnu99 -Iinclude "$work/constants.c" -o "$work/constants"
"$work/constants" > "$work/now.constants"
g++ -std=c++20 -g -O0 -fPIC -fvisibility=hidden -Iinclude -Ilib \
  -c lib/capi/frugal.cpp -o "$work/capi.o"
g++ -shared -Wl,--version-script=cmake/frugal.map \
  "$work/capi.o" "$work/probe.o" -o "$work/libfrugal.so"
abidw --exported-interfaces-only --no-show-locs --no-corpus-path --no-comp-dir-path \
  --no-elf-needed --no-architecture --type-id-style hash "$work/libfrugal.so" |
  sed "s,path='[^']*/,path=',; s/ language='[^']*'//" > "$work/now.abi"

functions=$(grep -c "<elf-symbol name='frugal_[a-z_]*' type='func-type'" "$work/now.abi" || true)
if [ "$functions" != "$(wc -l < tests/symbols.txt)" ]; then
  echo "$functions functions are described," \
    "and tests/symbols.txt has $(wc -l < tests/symbols.txt)" >&2
  exit 1
fi
if [ "${1:-}" = --renew ]; then
  cp "$work/now.abi" "$stored"
  cp "$work/now.constants" "$stored_constants"
  exit 0
fi
same=1
abidiff --harmless "$stored" "$work/now.abi" || same=0
diff "$stored_constants" "$work/now.constants" || same=0
if [ $same = 0 ]; then
  echo "the ABI is not that of $stored and $stored_constants;" \
    "tests/install/abi.sh --renew takes the new one" >&2
  exit 1
fi
count() { echo "$1" | wc -l; }
echo "$functions functions, $(count "$enums") enums, $(count "$constants") constants," \
  "$(count "$inits") defaults: the ABI of $stored"
