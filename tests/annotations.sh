#!/bin/sh
# Clang checks that the library uses what a lock guards (lib/base/annotations.h) only with the lock
# held. It reads many sources as one file, since most of its time is for headers.
#
#   annotations.sh ROOT CLANG++ [OPTIONS...]
root=$1 clang=$2
shift 2
check() {
  "$clang" -std=c++20 -fsyntax-only -ferror-limit=0 -Wthread-safety -Wthread-safety-beta -Werror \
    -DFRUGAL_ASSERTS=1 -I"$root/lib" -I"$root/include" "$@"
}

# The check finds known faults.
seen=$(mktemp -d) || exit 2
trap 'rm -rf "$seen"' EXIT
cat > "$seen/unguarded.cpp" <<'END'
# include "base/condition.h"
namespace frugal {
struct Counter {
  Mutex first ACQUIRED_BEFORE(second), second;
  Condition changed;
  int n GUARDED_BY(first) = 0;
  int read() REQUIRES(first) { return n; }
  void right() { Lock a(first); Lock b(second); ++n; read(); }
  void waits() {
    UniqueLock l(first); changed.wait(l, [&]() REQUIRES(first) { return n > 0; }); ++n;
  }
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

# All sources except the kernels and *_none.cpp, as three files. Sources that define the same
# local names are in different files.
for source in $(find "$root/lib" -maxdepth 2 -name '*.cpp' ! -name '*_none.cpp' | sort); do
  case $source in
    */flush/* | */control_client.cpp) file=third ;;
    */controller.cpp) file=first ;;
    */process/*) file=second ;;
    *) file=first ;;
  esac
  echo "#include \"$source\"" >> "$seen/$file.cpp"
done
status=0
for file in first second third; do check "$@" "$seen/$file.cpp" || status=1; done
checked=$(cat "$seen/first.cpp" "$seen/second.cpp" "$seen/third.cpp" | wc -l)
echo "$checked sources"
[ "$checked" -ge 90 ] || status=1
exit $status
