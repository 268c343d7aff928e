#!/bin/sh
# The library, its bindings and its tools have no wait that depends on the system clock: all timed
# waits are those of lib/base/condition.h and lib/base/futex.h.
#
#   clocks.sh ROOT
cd "$1" || exit 2
sources="--include=*.cpp --include=*.h --include=*.c --include=*.rs --include=*.py --include=*.jl"

# Prints such waits in files of the given folders. A wait_until of a Condition is right. A variable
# is a Condition by its name, which no std::condition_variable has. wait_for is always the standard
# library's.
waits() {
  grep -rnE -e 'system_clock|high_resolution_clock|CLOCK_REALTIME|timed_mutex|try_lock_for' \
    -e '(cond|mutex|sem|rwlock)_timed|SystemTime|gettimeofday|timespec_get' $sources "$@"
  # Python's and Julia's. (datetime returns dates, on which no wait depends.)
  grep -rnE '\btime\.time(_ns)?\(|from time import.*\btime(_ns)?\b' --include=*.py "$@"
  grep -rnE '(^|[^.A-Za-z_0-9!@])(time|now)\(\)' --include=*.jl "$@"
  named() {
    grep -rhoE "$1&? +[a-z_]+(, [a-z_]+)*[;),]" $sources lib |
      sed -E "s/$1&? +//; s/[,;)]/ /g" | tr -s ' ' '\n'
  }
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

# The check finds known waits.
seen=$(mktemp -d) || exit 2
trap 'rm -rf "$seen"' EXIT
cat > "$seen/waits.cpp" <<'END'
  ready.wait_for(l, std::chrono::seconds(1), done);
  state->changed.wait_until(l, at);
  all[i].wait_until(l, at);
  future().wait_for(at);
  cv_progress_.wait_for(lock, at, done);
  gettimeofday(&now, nullptr);
END
cat > "$seen/waits.py" <<'END'
end = time.time() + 1
from time import sleep, time
begin = time.monotonic()
END
cat > "$seen/waits.jl" <<'END'
    start, pause = time(), 0.001
    start = time_ns()
END
if [ "$(waits "$seen" | wc -l)" -ne 9 ]; then
  echo "of nine waits these are found:"
  waits "$seen"
  exit 1
fi

found=$(waits lib bindings tools | grep -vE '^lib/base/condition\.h:')
[ -z "$found" ] && exit 0
echo "waits by the system's clock:"
echo "$found"
exit 1
