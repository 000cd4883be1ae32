#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# run_all.sh <bench_gemv> <cases.inc> <output.json> [arguments of bench_gemv…]
# Every case in a process of its own, so that what one case leaves in the L2 cache cannot touch the next; one JSON.
set -euo pipefail
bench=$1 cases=$2 output=$3
shift 3
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
count=0
while IFS= read -r line; do
  case $line in
    BENCH_DENSE*) name=$(sed -E 's/BENCH_DENSE\((\w+), ([0-9]+), ([0-9]+)\)/\1 \2x\3/' <<<"$line") ;;
    BENCH_EXPERTS*) name=experts ;;
    *) continue ;;
  esac
  count=$((count + 1))
  "$bench" --only "$name" --json "$parts/$(printf %03d $count).json" "$@"
done <"$cases"
python3 - "$output" "$parts"/*.json <<'PYTHON'
import json
import sys

rows = [row for part in sys.argv[2:] for row in json.load(open(part, encoding="utf-8"))]
with open(sys.argv[1], "w", encoding="utf-8") as file:
    file.write("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n")
PYTHON
