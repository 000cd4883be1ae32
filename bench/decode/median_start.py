#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Of several starts of bench_startup, the one with the median total, with the steps of the last one.

    median_start.py ROWS_OF_A_START…      rows on stdout, as bench_startup writes them
"""
import json
import sys


def rows(path):
    return [json.loads(line.rstrip().rstrip(",")) for line in open(path) if line.strip()]


starts = [rows(path) for path in sys.argv[1:]]
total = lambda start: next(r["ms"] for r in start if r.get("phase") == "total")
median = sorted(starts, key=total)[len(starts) // 2]
for row in [r for r in median if "steps" not in r] + [r for r in starts[-1] if "steps" in r]:
    print(json.dumps(row, separators=(",", ":")) + ",")
