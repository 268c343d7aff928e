#!/bin/sh
# All C++ sources have the format of .clang-format, as clang-format 14 writes it.
# Other versions differ.
#
#   format.sh ROOT           lists the files that differ
#   format.sh ROOT --write   formats them
# Exit status: 0 none differ, 1 some do, 77 clang-format-14 is not installed.
cd "$1" || exit 2
command -v clang-format-14 >/dev/null || {
  echo "skipped: clang-format-14 is not installed"
  exit 77
}

# Lists the files of the standard input that differ.
differing() {
  xargs clang-format-14 --style=file --dry-run 2>&1 |
    sed -n 's/:[0-9]*:[0-9]*: warning: .*//p' | LC_ALL=C sort -u
}

# The check finds a wrong file.
seen=$(mktemp -d) || exit 2
trap 'rm -rf "$seen"' EXIT
cp .clang-format "$seen"
echo 'int good = 1;' > "$seen/good.cpp"
echo 'int   bad=1;' > "$seen/bad.cpp"
if [ "$(printf '%s\n' "$seen/good.cpp" "$seen/bad.cpp" | differing)" != "$seen/bad.cpp" ]; then
  echo "of two files another one than bad.cpp is found"
  exit 1
fi

found=$(find lib include tests tools bench -name '*.h' -o -name '*.hpp' -o -name '*.cpp' \
  -o -name '*.c' -o -name '*.inc' -o -name '*.cu' | differing)
[ -z "$found" ] && exit 0
if [ "$2" = --write ]; then
  echo "$found" | xargs clang-format-14 --style=file -i
  exit 0
fi
echo "$found"
echo "$(echo "$found" | wc -l) files differ: tests/format.sh . --write formats them"
exit 1
