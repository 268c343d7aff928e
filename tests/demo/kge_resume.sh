#!/bin/sh
# The demo is killed while it trains and writes checkpoints, again and again, and goes on from them.
# It ends with what an uninterrupted run prints: the same metrics, and the tables of a plain loop.
#   tests/demo/kge_resume.sh KGE
set -eu
kge=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
awk 'BEGIN {
  srand(7)
  for (i = 0; i < 3000; ++i) {
    h = int(rand() * 400); r = int(rand() * 7)
    print "e" h "\tr" r "\te" (h * (r + 3) + r) % 400
  }
}' >"$work/graph.tsv"
set -- --tsv "$work/graph.tsv" --dim 32 --batch 64 --negatives 32 --epochs 60 --baselines off
metrics() { grep '^complex' "$1"; }

"$kge" "$@" --verify 0 >"$work/whole"
names() { ls "$work/checkpoints"/*.checkpoint 2>/dev/null || true; }
kills=0
while :; do
  before=$(names)
  "$kge" "$@" --verify all --checkpoint "$work/checkpoints" --every 7 --resume >"$work/part" 2>&1 &
  pid=$!
  # It is killed once it has written another checkpoint.
  while kill -0 "$pid" 2>/dev/null && [ "$(names)" = "$before" ]; do
    :
  done
  if [ "$kills" -lt 5 ] && kill -9 "$pid" 2>/dev/null; then
    kills=$((kills + 1))
    wait "$pid" 2>/dev/null || true
    continue
  fi
  wait "$pid" || { cat "$work/part" >&2; exit 1; }
  break
done
grep -q '^resumed    after' "$work/part" || { echo "it has not resumed" >&2; exit 1; }
grep -q '^same bits as a plain loop: yes' "$work/part" || { cat "$work/part" >&2; exit 1; }
[ "$(metrics "$work/part")" = "$(metrics "$work/whole")" ] || {
  metrics "$work/whole" >&2
  metrics "$work/part" >&2
  exit 1
}
echo "$kills kills; $(metrics "$work/part")"
