#!/bin/sh
# Does a program print what README.md says?
#   examples/check.sh NAME COMMAND...   NAME: hello or movielens; the output must be the last block
#                                       of its section, byte for byte
set -eu
readme=$(dirname "$0")/README.md
name=$1
shift
expected=$(awk -v name="$name" '
  /^## / { here = $2 == name }
  /^```/ { if (here && !inside) block = ""; inside = !inside; next }
  here && inside { block = block $0 "\n" }
  END { printf "%s", block }' "$readme" && echo x)
[ "$expected" != x ] || { echo "README.md has no section $name" >&2; exit 1; }
out=$("$@" && echo x)
if [ "$out" != "$expected" ]; then
  work=$(mktemp -d)
  printf %s "${expected%x}" > "$work/README.md"
  printf %s "${out%x}" > "$work/printed"
  diff -u "$work/README.md" "$work/printed" >&2 || true
  rm -r "$work"
  echo "$* does not print what examples/README.md says" >&2
  exit 1
fi
echo "$name: as in README.md"
