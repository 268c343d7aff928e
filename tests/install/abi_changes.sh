#!/bin/sh
# Does abi.sh see a change? Each kind of change is made in a copy of what it reads, and has to be told.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
failures=0

# change NAME MENTIONED: applies the commands of standard input, and wants abi.sh to fail and to mention.
change() {
  rm -rf "$work/tree"
  mkdir -p "$work/tree/tests"
  cp -r "$root/include" "$root/lib" "$root/cmake" "$work/tree"
  cp -r "$root/tests/install" "$root/tests/symbols.txt" "$work/tree/tests"
  (cd "$work/tree" && sh -eu)
  if diff -r "$root/include" "$work/tree/include" > "$work/made"; then
    echo "$1: the change was not made" && failures=1
  elif "$work/tree/tests/install/abi.sh" > "$work/told" 2>&1; then
    echo "$1: not seen" && failures=1
  elif ! grep -q -- "$2" "$work/told"; then
    echo "$1: not told as \"$2\":" && cat "$work/told" && failures=1
  else
    echo "$1: seen"
  fi
}

change "a field more" "'uint64_t extra'" <<'EOT'
sed -i 's/^  uint64_t total;.*/&\n  uint64_t extra;/' include/frugal.h
EOT
change "a field of another type" "type of 'uint32_t part' changed" <<'EOT'
sed -i 's/^  uint32_t part; /  uint64_t part; /' include/frugal.h
EOT
change "an enumerator of another value" "FRUGAL_ERR_NAN" <<'EOT'
sed -i 's/FRUGAL_ERR_NAN = -14/FRUGAL_ERR_NAN = -34/' include/frugal.h
EOT
change "a constant of another value" "FRUGAL_STEP_SKIP" <<'EOT'
sed -i 's/define FRUGAL_STEP_SKIP 1u/define FRUGAL_STEP_SKIP 2u/' include/frugal.h
EOT
change "a constant of another sign" "FRUGAL_NO_STEP" <<'EOT'
sed -i 's/define FRUGAL_NO_STEP UINT64_MAX/define FRUGAL_NO_STEP ((int64_t)-1)/' include/frugal.h
EOT
change "a constant of another size" "FRUGAL_OP_PADDING" <<'EOT'
sed -i 's/define FRUGAL_OP_PADDING 1u/define FRUGAL_OP_PADDING (uint64_t)1/' include/frugal.h
EOT
change "another default" "FRUGAL_OPTIMIZER_INIT" <<'EOT'
sed -i 's/FRUGAL_SGD, 0.01f, 1e-8f,/FRUGAL_SGD, 0.01f, 1e-7f,/' include/frugal.h
EOT
change "a parameter of another type" "frugal_step_end" <<'EOT'
sed -i '/ frugal_step_end(/s/uint32_t flags/uint64_t flags/' include/frugal.h lib/capi/frugal.cpp
EOT
change "a function less" "\[D\].*frugal_health" <<'EOT'
sed -i '/^FRUGAL_API int32_t frugal_health(/d' include/frugal.h
sed -i 's/^int32_t frugal_health(/static &/' lib/capi/frugal.cpp
sed -i '/^frugal_health$/d' tests/symbols.txt
EOT
exit $failures
