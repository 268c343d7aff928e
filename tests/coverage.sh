#!/bin/sh
# Counts the branches of window, flush, cache, storage and format that their direct tests take.
# These folders are compiled to count branches, and only those tests run. Branches of exceptions
# that no test throws are left out (gcovr --exclude-throw-branches). So are branches of lib/format
# that no input reaches: a comment at each says why. All others of that folder must be taken.
#
#   coverage.sh ROOT FOLDER [PERCENT [OPTIONS OF GCOVR...]]     fails below PERCENT (90)
if ! command -v gcovr > /dev/null; then
  echo "gcovr is not installed"
  echo "0 passed, 0 failed, 1 skipped"
  exit 0
fi
root=$(cd "$1" && pwd) && mkdir -p "$2" && cd "$2" || exit 2
percent=${3:-90}
[ $# -ge 3 ] && shift 3 || shift $#
compile="$(command -v ccache) g++ -std=c++20 -ffp-contract=off -fno-math-errno -fno-trapping-math"
compile="$compile -I$root/lib -I$root/include -I$root/tests -Ischema"
tests="storage/holders storage/key_index storage/row_versions storage/row_write storage/rows
  storage/stored_rows storage/slab flush/queue window/apply window/part window/step_update
  window/window cache/row_cache
  format/names format/parameter_file format/manifest format/folder_check"
mkdir -p schema
capnp compile -oc++:schema --src-prefix="$root/lib/format" "$root/lib/format/manifest.capnp" ||
  exit 1
echo 'extern "C" const char* frugal_version() { return "0"; }' > version.cpp

# What is compiled, and how: lines "OBJECT FLAGS SOURCE".
{
  for source in "$root"/lib/storage/*.cpp "$root"/lib/flush/*.cpp "$root"/lib/window/*.cpp \
    "$root"/lib/cache/*.cpp "$root"/lib/format/*.cpp; do
    case $source in *_none.cpp) continue ;; esac
    echo "$(basename "$(dirname "$source")")_$(basename "$source" .cpp).o -O0 -g --coverage $source"
  done
  for source in "$root"/lib/base/*.cpp "$root"/lib/files/*.cpp; do
    echo "$(basename "$(dirname "$source")")_$(basename "$source" .cpp).o -O1 $source"
  done
  echo "schema.o -O1 schema/manifest.capnp.c++"
  echo "version.o -O1 version.cpp"
  for source in "$root"/lib/device/cpu/*.cpp; do
    case $source in
      *_avx2*) isa="-mavx2" ;;
      *_avx512*) isa="-mavx512f -mavx512vl -mavx512bw -mavx512dq" ;;
      *) isa="" ;;
    esac
    echo "cpu_$(basename "$source" .cpp).o -O1 $isa $source"
  done
  for test in $tests; do echo "test_$(basename "$test").o -O0 $root/tests/${test}_test.cpp"; done
} > sources
rm -f ./*.gcda
xargs -P "$(nproc)" -L 1 sh -c "object=\$0; exec $compile -c -o \$object \"\$@\"" < sources ||
  exit 1
g++ --coverage -o direct_tests $(cut -d ' ' -f 1 sources) -lgtest -lgtest_main -lpthread -ldl \
  -lcapnp -lkj ||
  exit 1
./direct_tests --gtest_brief=1 || exit 1
gcovr --root "$root" --filter "$root/lib/(window|flush|cache|storage)/" \
  --exclude-throw-branches --exclude-unreachable-branches \
  --branches --fail-under-branch "$percent" "$@" . || exit 1
gcovr --root "$root" --filter "$root/lib/format/" --exclude-throw-branches \
  --exclude-unreachable-branches --branches --fail-under-branch 100 "$@" . || exit 1
echo "1 passed, 0 failed, 0 skipped"
