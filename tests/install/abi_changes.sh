#!/bin/sh
# abi.sh finds changes: it has to print each kind of change, made in a copy of the files that it
# reads.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
failures=0

# change NAME MENTIONED...: runs the commands of the standard input. abi.sh then has to fail, and to
# print each MENTIONED.
change() {
  name=$1
  shift
  rm -rf "$work/tree"
  mkdir -p "$work/tree/tests"
  cp -r "$root/include" "$root/lib" "$root/cmake" "$work/tree"
  cp -r "$root/tests/install" "$root/tests/symbols.txt" "$work/tree/tests"
  (cd "$work/tree" && sh -eu)
  made=$(diff -r "$root/include" "$work/tree/include" | grep -c '^[0-9,]*[acd][0-9,]*$') || true
  if [ "$made" != $# ]; then
    echo "$name: $made changes were made, not $#" && failures=1
  elif "$work/tree/tests/install/abi.sh" > "$work/told" 2>&1; then
    echo "$name: not seen" && failures=1
  else
    for mentioned in "$@"; do
      if grep -q -- "$mentioned" "$work/told"; then
        echo "$name: told as \"$mentioned\""
      else
        echo "$name: not told as \"$mentioned\":" && cat "$work/told" && failures=1
      fi
    done
  fi
}

change "fields and parameters" "'uint64_t extra'" "type of 'uint32_t part' changed" \
  "frugal_step_end" <<'EOT'
sed -i 's/^  uint64_t total;.*/&\n  uint64_t extra;/' include/frugal.h
sed -i 's/^  uint32_t part;/  uint64_t part;/' include/frugal.h
sed -i '/ frugal_step_end(/s/uint32_t flags/uint64_t flags/' include/frugal.h lib/capi/frugal.cpp
EOT
change "constants of another value, sign and size, and another default" FRUGAL_ERR_NAN \
  FRUGAL_STEP_SKIP FRUGAL_NO_STEP FRUGAL_OP_PADDING FRUGAL_OPTIMIZER_INIT <<'EOT'
sed -i 's/FRUGAL_ERR_NAN = -14/FRUGAL_ERR_NAN = -34/' include/frugal.h
sed -i 's/define FRUGAL_STEP_SKIP 1u/define FRUGAL_STEP_SKIP 2u/' include/frugal.h
sed -i 's/define FRUGAL_NO_STEP UINT64_MAX/define FRUGAL_NO_STEP ((int64_t)-1)/' include/frugal.h
sed -i 's/define FRUGAL_OP_PADDING 1u/define FRUGAL_OP_PADDING (uint64_t)1/' include/frugal.h
sed -i 's/FRUGAL_SGD, 0.01f, 1e-8f,/FRUGAL_SGD, 0.01f, 1e-7f,/' include/frugal.h
EOT
change "a function less" "\[D\].*frugal_health" <<'EOT'
sed -i '/^FRUGAL_API int32_t frugal_health(/d' include/frugal.h
sed -i 's/^int32_t frugal_health(/static &/' lib/capi/frugal.cpp
sed -i '/^frugal_health$/d' tests/symbols.txt
EOT
exit $failures
