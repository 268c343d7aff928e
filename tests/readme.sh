#!/bin/sh
# The C example of README.md compiles without a warning, runs, and has no more than 32 lines.
# The examples in the comments of frugal.h compile as one program, in their order, and it runs.
#   tests/readme.sh LIBRARY WORK_FOLDER     (CC names the compiler, CFLAGS adds to its options)
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
library=$1
work=$2
mkdir -p "$work"
# compile NAME: $work/NAME.c becomes $work/NAME.
compile() {
  # shellcheck disable=SC2086  # CFLAGS is a list
  ${CC:-cc} -std=c99 -Wall -Wextra -Wpedantic -Werror ${CFLAGS:-} -I "$root/include" \
    "$work/$1.c" -o "$work/$1" "$library" "-Wl,-rpath,$(cd "$(dirname "$library")" && pwd)"
}

awk '/^```c$/ { inside = 1; next } /^```/ { inside = 0 } inside' "$root/README.md" \
  > "$work/readme_example.c"
lines=$(wc -l < "$work/readme_example.c")
if [ "$lines" -eq 0 ] || [ "$lines" -gt 32 ]; then
  echo "the example of README.md has $lines lines" >&2
  exit 1
fi
compile readme_example
out=$("$work/readme_example")
echo "$out"
# 500 steps towards 1 with two gradients a step at rate 0.01: 1 - 0.98^499.
case $out in
  "row 7: 0.9999"*) ;;
  *) echo "expected a row near 1" >&2; exit 1 ;;
esac

# An example is the indented lines after a line " * Example: ...". Those of two processes and of
# checkpoints are compiled and not run.
{
  cat <<'EOC'
# include <stdio.h>
# include <stdlib.h>
# include "frugal.h"

static void check(int32_t status) {
  frugal_error error;
  frugal_last_error(&error);
  if (status != FRUGAL_OK) exit(fprintf(stderr, "%s\n", error.message) > 0);
}

int main(int argc, char **argv) {
  (void)argv;
EOC
  awk '
    /^ \* Example: serve/ { print "  if (argc == 1) { check(frugal_close(engine)); return 0; }" }
    /^ \* Example: / { inside = 1; ++examples; next }
    inside && /^ \*     / { print substr($0, 6); ++lines; next }
    inside && !/^ \*$/ { inside = 0 }
    END { print "  return " examples " != 5 || " lines " < 40;" }' "$root/include/frugal.h"
  echo '}'
} > "$work/header_examples.c"
grep -q '^  return 5 != 5 || [4-9][0-9] < 40;$' "$work/header_examples.c" ||
  { echo "frugal.h has not the five examples" >&2; exit 1; }
compile header_examples
"$work/header_examples"
echo "the examples of frugal.h"
