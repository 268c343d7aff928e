#!/bin/sh
# Does a movielens read FILE by the grammar of README.md?
#   examples/check_lines.sh COMMAND...     a file's path is added to the command
set -eu
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
failures=0

# run COMMAND...: writes its output and errors to files, and prints its exit status.
run() {
  status=0
  "$@" "$work/file" > "$work/out" 2> "$work/errors" < /dev/null || status=$?
  echo "$status"
}

# wrong NAME WHAT: counts a failure, and prints it with the program's output.
wrong() {
  echo "$1: $2" && head -n 5 "$work/out" "$work/errors"
  failures=$((failures + 1))
} >&2

# bad TEXT: line 3 of a file, with printf's escapes. The program has to refuse it.
bad() {
  text=$1
  shift
  printf '%b' "1 2 3\n \t\r\n$text\n" \
    '3 4 5\n3 4 5\n3 4 5\n3 4 5\n3 4 5\n3 4 5\n3 4 5\n3 4 5\n3 4 5\n' > "$work/file"
  [ "$(run "$@")" = 1 ] || wrong "$text" "the exit status is not 1"
  grep -q 'line 3 is not of the form user, item, rating' "$work/errors" ||
    wrong "$text" "line 3 is not blamed"
  [ ! -s "$work/out" ] || wrong "$text" "something is printed"
}

# Every good form: 22 ratings, the last one without a line feed. The last digits depend on the keys.
printf '%b' '1\t2\t3\t881250949\n' '\n \t \r\n' '  1 \t 7  4.5\r\n' \
  '3 4 -2.25e+1 \0377\0376\0000\v\n' '0007 0 +5e-1\n' \
  '18446744073709551615 18446744073709551614 1 2 3\n' '8 9 1e-999\n' \
  '8 10 0e99999999999999999999\n' '8 11 1.00000017881393432617187499999\n' \
  '8 12 0000000000000000000000000000000000000000000000000002.5\n' \
  '1 3 3.5\n2 3 2.5\n3 3 1.5\n4 3 4.5\n5 3 3.5\n6 3 2.5\n7 3 1.5\n' \
  '1 4 3.5\n2 4 2.5\n3 4 1.5\n4 4 4.5\n5 4 3.5\n18446744073709551615 4 1.25' > "$work/file"
cat > "$work/expected" <<'EOT'
20 ratings to train, 2 to test, mean 0.9125
epoch  1: train RMSE 5.5239, test RMSE 3.1041
epoch 10: train RMSE 4.7715, test RMSE 3.4336
EOT
status=$(run "$@")
[ "$status" = 0 ] || wrong "good lines" "the exit status is $status"
sed '3,10d' "$work/out" | diff "$work/expected" - >&2 ||
  wrong "good lines" "other numbers than in examples/check_lines.sh"

for text in '1 2' '1 2 x' 'x 2 3' '-1 2 3' '1 +2 3' '0x1 2 3' '1 1.0 3' \
  '18446744073709551616 2 3' '1,2,3' '1 2-3' '1 2 3,5' '1 2 3x' '1 2 3\0000' '1\v2 3' '1 2 nan' \
  '1 2 inf' '1 2 0x10' '1 2 .5' '1 2 5.' '1 2 1e' '1 2 1E1' '1 2 +-1' '1 2 1_0' \
  '1 2 1e39' '1 2 1e999' '1 2 \0331\0241' '\0302\02401 2 3' '\0'; do
  bad "$text" "$@"
done

printf '1 2 3\n%.0s' 1 2 3 4 5 6 7 8 9 > "$work/file"
[ "$(run "$@")" = 1 ] || wrong "9 ratings" "the exit status is not 1"
rm "$work/file"
[ "$(run "$@")" = 1 ] || wrong "no file" "the exit status is not 1"
[ "$failures" = 0 ] || exit 1
echo "movielens reads FILE as README.md says"
