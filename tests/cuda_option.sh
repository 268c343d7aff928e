#!/bin/sh
# -DFRUGAL_CUDA=AUTO|ON|OFF with a CUDA compiler that is too old, or missing.
#   tests/cuda_option.sh WORK_FOLDER
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
rm -rf "$1"
mkdir -p "$1"
work=$(cd "$1" && pwd)
fail() { echo "$*" >&2; exit 1; }

printf '#!/bin/sh\necho "Cuda compilation tools, release 12.9, V12.9.86"\n' > "$work/nvcc"
chmod +x "$work/nvcc"
# configure VALUE NVCC: without the rest of the tree, which does not depend on this option.
configure() {
  rm -rf "$work/build"
  CUDACXX=$2 cmake -S "$root" -B "$work/build" -G Ninja "-DFRUGAL_CUDA=$1" \
    -DFRUGAL_PROCESSES=OFF -DFRUGAL_TESTS=OFF -DFRUGAL_BENCH=OFF -DFRUGAL_EXAMPLES=OFF \
    -DFRUGAL_TOOLS=OFF > "$work/log" 2>&1
}
for nvcc in "$work/nvcc" "$work/none"; do
  configure AUTO "$nvcc" || fail "AUTO: $(cat "$work/log")"
  grep -q 'No compiler of CUDA 13 or later: no CUDA devices' "$work/log" ||
    fail "AUTO says nothing: $(cat "$work/log")"
  if configure ON "$nvcc"; then fail "ON is content with $nvcc"; fi
  tr '\n' ' ' < "$work/log" | grep -q 'wants  *nvcc of CUDA 13 or later' ||
    fail "ON: $(cat "$work/log")"
done
configure OFF "$work/nvcc" || fail "OFF: $(cat "$work/log")"
if grep -q CUDA "$work/log"; then fail "OFF searches for a compiler: $(cat "$work/log")"; fi
echo "AUTO, ON and OFF are right"
