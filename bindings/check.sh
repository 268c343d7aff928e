# The checks of the bindings source this file after they have set
#   name   the language
#   build  the build folder of a library; a check writes into $build/$name only
# A check counts tests and ends with `finish`, which prints "N passed, M failed, K skipped" as the
# last line. The exit status is 0 if M is 0. ./dev test adds the numbers to its own.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
work=$build/$name
logs=$work/logs
mkdir -p "$logs"
# shellcheck source=tools/shell.sh
. "$root/tools/shell.sh"
say() { printf '== %s: %s\n' "$name" "$*"; }
passed=0 failed=0 skipped=0
library=$(find "$build" "$build/lib" -maxdepth 1 -name libfrugal.so.0 2>/dev/null | head -n 1) ||
  true

finish() {
  echo "$passed passed, $failed failed, $skipped skipped"
  [ "$failed" = 0 ]
  exit
}

# step TEST COMMAND...: counts as one test. The command's output goes to a log; if the command
# fails, step prints the log's end. Call it as a plain command, not in a condition or before ||:
# there -e would not end a function at its first failure.
step() {
  local test=$1 start=$SECONDS
  shift
  set +e
  (set -e; "$@") >"$logs/$test.log" 2>&1 </dev/null
  status=$?
  set -e
  if [ "$status" = 0 ]; then
    passed=$((passed + 1))
    say "$test: ok ($((SECONDS - start)) s)"
  else
    failed=$((failed + 1))
    tail -n 40 "$logs/$test.log"
    say "$test: FAILED; all of it: $logs/$test.log"
  fi
}

# first TEST COMMAND...: a step that the later ones depend on. If it fails, the check ends.
first() {
  step "$@"
  [ "$status" = 0 ] || finish
}

skip() {
  skipped=$((skipped + 1))
  say "$1: SKIPPED, $2"
}

# count TEST START PASSED FAILED SKIPPED: adds the numbers of a test program that began at second
# START.
count() {
  passed=$((passed + $3)) failed=$((failed + $4)) skipped=$((skipped + $5))
  say "$1: $3 passed, $4 failed, $5 skipped ($((SECONDS - $2)) s)"
}

# op_script [--together] COMMAND...: replays scripts with this command, which gets a script's path
# as its last argument. VARIABLE=VALUE may come first. With --together it gets all paths at once.
# tests/opscript/compare.py finds the command by the language's name.
op_script() {
  local options=()
  if [ "$1" = --together ]; then
    options+=("$1")
    shift
  fi
  local runner=$build/tests/opscript/opscript_$name
  if [ ! -x "$build/tests/opscript/opscript_maker" ]; then
    failed=$((failed + 1))
    say "op-script: FAILED, $build has no tests/opscript/opscript_maker"
    return 0
  fi
  { echo '#!/bin/sh' && printf 'exec env' && printf " '%s'" "$@" && echo ' "$@"'; } >"$runner"
  chmod +x "$runner"
  step op-script python3 "$root/tests/opscript/compare.py" "${options[@]}" "$build" "$name"
}

[ -n "$library" ] || {
  failed=1
  say "no libfrugal.so.0 in $build"
  finish
}
