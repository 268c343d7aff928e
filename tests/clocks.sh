#!/bin/sh
# Nothing that may wait by the system's clock stands in the library, its bindings or its tools: timed waits are those of
# lib/base/condition.h and lib/base/futex.h.
#
#   clocks.sh ROOT
cd "$1" || exit 2
sources="--include=*.cpp --include=*.h --include=*.c --include=*.rs"

# What stands in files of the folders given. A Condition's wait_until is known by its name, which no variable of the standard
# library's has; wait_for is always the standard library's.
waits() {
  grep -rnE 'system_clock|high_resolution_clock|CLOCK_REALTIME|timed_mutex|try_lock_for|(cond|mutex|sem|rwlock)_timed|SystemTime' \
    $sources "$@"
  named() { grep -rhoE "$1&? +[a-z_]+(, [a-z_]+)*[;),]" $sources lib | sed -E "s/$1&? +//; s/[,;)]/ /g" | tr -s ' ' '\n'; }
  ours=$(named '\bCondition' | sort -u)
  theirs=$(named 'std::condition_variable(_any)?' | sort -u)
  grep -rnE '(\.|->)wait_(for|until)\(' $sources "$@" | awk -v ours="$ours" -v theirs="$theirs" '
    BEGIN { n = split(ours, o, "\n"); for (i = 1; i <= n; ++i) fine[o[i]]
            n = split(theirs, t, "\n"); for (i = 1; i <= n; ++i) delete fine[t[i]] }
    { rest = $0
      while (match(rest, /[A-Za-z_0-9]*(\]|\))*(\.|->)wait_(for|until)\(/)) {
        call = substr(rest, RSTART, RLENGTH); rest = substr(rest, RSTART + RLENGTH)
        name = call; sub(/(\.|->)wait_.*/, "", name)
        if (call ~ /wait_for/ || !(name in fine)) { print; next }
      } }'
}

# It finds what it is to find.
seen=$(mktemp -d) || exit 2
trap 'rm -rf "$seen"' EXIT
cat > "$seen/waits.cpp" <<'END'
  ready.wait_for(l, std::chrono::seconds(1), done);
  state->changed.wait_until(l, at);
  all[i].wait_until(l, at);
  future().wait_for(at);
  cv_progress_.wait_for(lock, at, done);
END
if [ "$(waits "$seen" | wc -l)" -ne 5 ]; then
  echo "of five waits only these are found:"
  waits "$seen"
  exit 1
fi

found=$(waits lib bindings tools | grep -vE '^lib/base/condition\.h:')
[ -z "$found" ] && exit 0
echo "waits by the system's clock:"
echo "$found"
exit 1
