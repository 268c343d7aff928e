#!/bin/sh
# What locks guard (lib/base/annotations.h) is touched with them held: clang says so of each source in which a lock of
# lib/base/sync.h is named, with its header. It reads them as one file, since most of its time is for headers.
#
#   annotations.sh ROOT CLANG++ [OPTIONS...]
root=$1 clang=$2
shift 2
check() {
  "$clang" -std=c++20 -fsyntax-only -ferror-limit=0 -Wthread-safety -Wthread-safety-beta -Werror -DFRUGAL_ASSERTS=1 \
    -I"$root/lib" -I"$root/include" "$@"
}

# It finds what it is to find.
seen=$(mktemp -d) || exit 2
trap 'rm -rf "$seen"' EXIT
cat > "$seen/unguarded.cpp" <<'END'
#include "base/condition.h"
namespace frugal {
struct Counter {
  Mutex first ACQUIRED_BEFORE(second), second;
  Condition changed;
  int n GUARDED_BY(first) = 0;
  int read() REQUIRES(first) { return n; }
  void right() { Lock a(first); Lock b(second); ++n; read(); }
  void waits() { UniqueLock l(first); changed.wait(l, [&]() REQUIRES(first) { return n > 0; }); ++n; }
  void without() { ++n; }
  void other() { Lock l(second); ++n; }
  void called() { read(); }
  void behind() { UniqueLock l(first); l.unlock(); ++n; }
  void kept() { first.lock(); }
  void twice() { Lock a(first); Lock b(first); }
  void order() { Lock b(second); Lock a(first); }
};
}
END
echo '#include "unguarded.cpp"' > "$seen/one.cpp"
errors=$(check "$seen/one.cpp" 2>&1 | grep -c ' error: ')
if [ "$errors" -ne 7 ]; then
  echo "of seven faults $errors are found:"
  check "$seen/one.cpp"
  exit 1
fi

named='\b(Mutex|TimedMutex|Lock|UniqueLock|UrgentLock|GUARDED_BY|REQUIRES)\b'
sources=$(grep -rlE "$named" "$root/lib" --include=*.h --include=*.cpp | sed -E 's/\.(h|cpp)$/.cpp/' | sort -u)
status=0 checked=0
for source in $sources; do
  [ -f "$source" ] || continue
  echo "#include \"$source\""
  checked=$((checked + 1))
done > "$seen/all.cpp"
check "$@" "$seen/all.cpp" || status=1
echo "$checked sources"
[ "$checked" -ge 40 ] || status=1
exit $status
