#!/bin/sh
# An installed Frugal that was moved builds and runs programs outside the tree, with find_package
# and with pkg-config.
#   tests/install/prefix.sh BUILD_FOLDER WORK_FOLDER     (CC and CXX name the compilers)
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build=$(cd "$1" && pwd)
rm -rf "$2"
mkdir -p "$2/outside"
work=$(cd "$2" && pwd)
CC=${CC:-cc} CXX=${CXX:-c++}
fail() { echo "$*" >&2; exit 1; }

cmake --install "$build" --prefix "$work/installed" > "$work/install.log"
mv "$work/installed" "$work/moved"
prefix=$work/moved
libdir=$(dirname "$(find "$prefix" -name libfrugal.so)")
for file in include/frugal.h include/frugal.hpp; do
  cmp "$root/$file" "$prefix/$file"
done
cmp "$root/LICENSE" "$prefix/share/doc/frugal/LICENSE"

# The installed files do not name the folder of the build.
if grep -rlF -e "$build" -e "$root" -e "$work/installed" "$prefix" \
  --include='*.cmake' --include='*.pc'; then
  fail "these files name the folder of the build"
fi
dynamic() { readelf -d "$1" | sed -n "s/.*($2).*\[\(.*\)\]/\1/p"; }
[ -z "$(dynamic "$libdir/libfrugal.so" RUNPATH)$(dynamic "$libdir/libfrugal.so" RPATH)" ] ||
  fail "the library has a run path"

# Programs find the library by its SONAME, libfrugal.so.MAJOR; libfrugal.so is for linking.
version() { sed -n "s/^#define FRUGAL_VERSION_$1 //p" "$root/include/frugal.h"; }
soname=libfrugal.so.$(version MAJOR)
full=$(version MAJOR).$(version MINOR).$(version PATCH)
[ "$(dynamic "$libdir/libfrugal.so" SONAME)" = "$soname" ] || fail "the SONAME is not $soname"
[ "$(readlink -f "$libdir/$soname")" = "$libdir/libfrugal.so.$full" ] ||
  fail "$soname is not libfrugal.so.$full"
export PKG_CONFIG_PATH="$libdir/pkgconfig"
[ "$(pkg-config --modversion frugal)" = "$full" ] ||
  fail "frugal.pc has another version than frugal.h"

# frugal-top finds the library of its own prefix.
[ "$("$prefix/bin/frugal-top" 2>&1 | head -n 1 | cut -d ' ' -f 1)" = frugal-top ] ||
  fail "frugal-top does not start"
"$prefix/bin/frugal-fsck" --help > /dev/null || fail "frugal-fsck does not start"

# pkg-config.
cd "$work/outside"
cp "$root/examples/hello.c" "$root/examples/hello.cpp" .
run_path=-Wl,-rpath,$(pkg-config --variable=libdir frugal)
# shellcheck disable=SC2046  # lists
$CC -std=c99 -Wall -Wextra -Werror hello.c \
  $(pkg-config --cflags --libs frugal) "$run_path" -o hello_c
# shellcheck disable=SC2046
$CXX -std=c++17 -Wall -Wextra -Werror hello.cpp \
  $(pkg-config --cflags --libs frugal) "$run_path" -o hello_cpp
for program in hello_c hello_cpp; do
  dynamic $program NEEDED | grep -qx "$soname" || fail "$program does not need $soname"
  "$root/examples/check.sh" hello "./$program"
done

# find_package.
cat > CMakeLists.txt <<'EOT'
cmake_minimum_required(VERSION 3.20)
project(outside LANGUAGES C CXX)
find_package(frugal 0.1 REQUIRED)
add_executable(hello_c hello.c)
add_executable(hello_cpp hello.cpp)
target_compile_features(hello_cpp PRIVATE cxx_std_17)
target_link_libraries(hello_c PRIVATE frugal::frugal)
target_link_libraries(hello_cpp PRIVATE frugal::frugal)
EOT
configure() {
  cmake -S . -B "$1" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_FIND_PACKAGE_NO_PACKAGE_REGISTRY=ON \
    -DCMAKE_C_COMPILER="$CC" -DCMAKE_CXX_COMPILER="$CXX" > "$1.log" 2>&1
}
configure build || { cat build.log >&2; fail "find_package does not find it"; }
cmake --build build > compile.log 2>&1 || { cat compile.log >&2; fail "it does not build"; }
for program in hello_c hello_cpp; do
  "$root/examples/check.sh" hello "build/$program"
done
sed -i 's/frugal 0.1/frugal 99/' CMakeLists.txt
if configure refused; then fail "version $full was taken for version 99"; fi
grep -q 'version: *'"$full" refused.log || fail "why version 99 is not there is not told"

# Absolute folders, outside the prefix and inside.
folders() { # LIBDIR INCLUDEDIR: prints what frugal.pc has for the prefix /p
  cmake -S "$root" -B absolute -DCMAKE_INSTALL_PREFIX=/p -DCMAKE_INSTALL_LIBDIR="$1" \
    -DCMAKE_INSTALL_INCLUDEDIR="$2" -DFRUGAL_CUDA=OFF -DFRUGAL_TESTS=OFF -DFRUGAL_EXAMPLES=OFF \
    -DFRUGAL_BENCH=OFF -DFRUGAL_TOOLS=OFF -DCMAKE_C_COMPILER="$CC" -DCMAKE_CXX_COMPILER="$CXX" \
    > absolute.log 2>&1 ||
    { cat absolute.log >&2; fail "with LIBDIR=$1 it does not configure"; }
  sed -n 's/^[a-z]*dir=//p; s/^prefix=//p' absolute/frugal.pc | tr '\n' ' '
}
# shellcheck disable=SC2016  # pkg-config's variables
{
  [ "$(folders /lib /include)" = '/p /lib /include ' ] ||
    fail "frugal.pc is wrong with folders outside the prefix"
  wanted='${pcfiledir}/../../../ ${prefix}/lib/x ${prefix}/include '
  [ "$(folders /p/lib/x /p/include)" = "$wanted" ] ||
    fail "frugal.pc is wrong with absolute folders inside the prefix"
}
echo "installed, moved, found: $full, $soname"
