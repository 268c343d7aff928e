#!/bin/sh
# Nothing that may wait by the system's clock stands in the library, its bindings or its tools: timed waits are those of
# lib/base/condition.h and lib/base/futex.h.
#
#   clocks.sh ROOT
cd "$1" || exit 2
found=$(grep -rnE 'system_clock|high_resolution_clock|CLOCK_REALTIME|wait_for\(lock|timed_mutex|try_lock_for|(cond|mutex|sem|rwlock)_timed|SystemTime' \
  lib bindings tools --include='*.cpp' --include='*.h' --include='*.c' --include='*.rs' | grep -vE '^lib/base/condition\.h:')
[ -z "$found" ] && exit 0
echo "waits by the system's clock:"
echo "$found"
exit 1
