#!/bin/sh
# One header (lib/device/element.h) chooses the element of stored rows: the library's C++ also
# compiles with another element than fp32. The check makes no object, and tries no CUDA kernel.
#
#   element.sh ROOT C++ [OPTIONS...]
root=$1 compiler=$2
shift 2
seen=$(mktemp -d) || exit 2
trap 'rm -rf "$seen"' EXIT
check() {
  "$compiler" -std=c++20 -fsyntax-only -w -DFRUGAL_ELEMENT_PROBE=_Float16 \
    -I"$root/lib" -I"$root/include" -I"$root/tests" "$@"
}

# The check finds a known fault.
cat > "$seen/right.cpp" <<'END'
# include "device/kernels.h"
namespace frugal::device {
Element* first(const RowsRef& rows) { return rows.row(0); }
float second(const RowsRef& rows) { return as_float(rows.row(0)[1]); }
}
END
sed 's/^Element\*/float*/' "$seen/right.cpp" > "$seen/wrong.cpp"
check "$seen/right.cpp" || exit 1
if check "$seen/wrong.cpp" 2> /dev/null; then
  echo "a row of floats is not found"
  exit 1
fi

# All sources above lib/base, as two files, since most of the time is for headers; then the kernels
# of one instruction set, and those of the simulated GPU.
for source in $(find "$root/lib" -maxdepth 2 -name '*.cpp' ! -name '*_none.cpp' | sort); do
  case $source in
    */base/* | */flush/* | */control_*.cpp | */capi/*) continue ;;
    */process/controller.cpp) file=first ;;
    */process/*) file=second ;;
    *) file=first ;;
  esac
  echo "#include \"$source\"" >> "$seen/$file.cpp"
done
status=0
for file in "$seen/first.cpp" "$seen/second.cpp" "$root/tests/sim/kernels.cpp" \
  "$root"/lib/device/cpu/kernels_baseline_*.cpp; do
  check "$@" "$file" || status=1
done
checked=$(cat "$seen/first.cpp" "$seen/second.cpp" | wc -l)
echo "$checked sources"
[ "$checked" -ge 60 ] || status=1
exit $status
