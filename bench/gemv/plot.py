#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws bench/results/<gpu>/gemv.json as an SVG: time over bytes, with the read-only floor of the same run.

    plot.py gemv.json gemv.svg
"""
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import roofline

SERIES = [("m = 1", 1, "#1f6fb4"), ("m = 8", 8, "#d1495b"), ("m = 16", 16, "#e8a33d")]


def main(source, target):
    with open(source, encoding="utf-8") as file:
        rows = [r for r in json.load(file) if r["chain"] == "pdl" and r["suite"] in ("dense", "experts_gate_up", "experts_down")
                and r["us"] > 0 and r["kernel"] != "cublasLt"]
    if not rows:
        sys.exit(f"{source}: no chained rows to draw")
    longest = max(rows, key=lambda r: r["floor_us"])
    series = [(label, colour, [(r["bytes"], r["us"], f"{r['suite']} {r['geometry']} m={m}: {r['us']:.2f} us, {r['gbps']:.0f} GB/s")
                               for r in rows if r["m"] == m]) for label, m, colour in SERIES]
    floors = [(r["bytes"], r["floor_us"], f"read only: {r['floor_us']:.2f} us") for r in rows if r["m"] == 1]
    roofline.draw(target, f"Matrix-vector kernels on {rows[0]['device']}, chained, weights from memory", "weight bytes read, MB",
                  "microseconds a launch", series, floors, longest["bytes"] / longest["floor_us"])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
