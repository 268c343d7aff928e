#!/bin/sh
# The C example of README.md compiles without a warning, runs, and has no more than 32 lines.
#   tests/readme.sh LIBRARY WORK_FOLDER     (CC names the compiler, CFLAGS adds to its options)
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
library=$1
work=$2
mkdir -p "$work"
awk '/^```c$/ { inside = 1; next } /^```/ { inside = 0 } inside' "$root/README.md" \
  > "$work/readme_example.c"
lines=$(wc -l < "$work/readme_example.c")
if [ "$lines" -eq 0 ] || [ "$lines" -gt 32 ]; then
  echo "the example of README.md has $lines lines" >&2
  exit 1
fi
# shellcheck disable=SC2086  # CFLAGS is a list
${CC:-cc} -std=c99 -Wall -Wextra -Wpedantic -Werror ${CFLAGS:-} -I "$root/include" \
  "$work/readme_example.c" -o "$work/readme_example" "$library" \
  "-Wl,-rpath,$(cd "$(dirname "$library")" && pwd)"
out=$("$work/readme_example")
echo "$out"
# 500 steps towards 1 with two gradients a step at rate 0.01: 1 - 0.98^499.
case $out in
  "row 7: 0.9999"*) ;;
  *) echo "expected a row near 1" >&2; exit 1 ;;
esac
