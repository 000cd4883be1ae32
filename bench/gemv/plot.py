#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws bench/results/<gpu>/gemv.json as an SVG: time over bytes, with the read-only floor of the same run.

    plot.py gemv.json gemv.svg
"""
import json
import math
import sys

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 520, 70, 220, 40, 60
SERIES = [("m = 1", 1, "#1f6fb4"), ("m = 8", 8, "#d1495b"), ("m = 16", 16, "#e8a33d")]


def main(source, target):
    with open(source, encoding="utf-8") as file:
        rows = [r for r in json.load(file) if r["chain"] == "pdl" and r["suite"] in ("dense", "experts_gate_up", "experts_down") and r["us"] > 0]
    if not rows:
        sys.exit(f"{source}: no chained rows to draw")
    x_low, x_high = min(r["bytes"] for r in rows) / 1.5, max(r["bytes"] for r in rows) * 1.5
    y_low, y_high = min(r["floor_us"] for r in rows) / 1.5, max(r["us"] for r in rows) * 1.5

    def x(value):
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / x_low) / math.log(x_high / x_low)

    def y(value):
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(value / y_low) / math.log(y_high / y_low)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
           f'<text x="{LEFT}" y="22" font-size="15">Matrix-vector kernels on {rows[0]["device"]}, chained, weights from memory</text>']
    for power in range(5, 10):
        for step in (1, 3):
            value = step * 10 ** power
            if x_low < value < x_high:
                out.append(f'<line x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#e5e5e5"/>'
                           f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value / 1e6:g}</text>')
    for value in (0.5, 1, 2, 5, 10, 20, 50, 100):
        if y_low < value < y_high:
            out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#e5e5e5"/>'
                       f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 16}" text-anchor="middle">weight bytes read, MB</text>')
    out.append(f'<text transform="translate(18 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">microseconds a launch</text>')
    # The roof: the memory's rate in the longest read.
    longest = max(rows, key=lambda r: r["floor_us"])
    rate = longest["bytes"] / longest["floor_us"]
    ends = [v for v in (max(x_low, y_low * rate), x_high)]
    out.append(f'<line x1="{x(ends[0]):.1f}" y1="{y(ends[0] / rate):.1f}" x2="{x(ends[1]):.1f}" y2="{y(ends[1] / rate):.1f}" stroke="#888" stroke-dasharray="5 4"/>')
    for r in rows:
        if r["m"] == 1 and r["kernel"] != "cublasLt":
            px, py = x(r["bytes"]), y(r["floor_us"])
            out.append(f'<path d="M{px - 5:.1f} {py:.1f}H{px + 5:.1f}" stroke="#333" stroke-width="2"><title>read only: {r["floor_us"]:.2f} us</title></path>')
    for label, m, colour in SERIES:
        for r in rows:
            if r["m"] == m and r["kernel"] != "cublasLt":
                out.append(f'<circle cx="{x(r["bytes"]):.1f}" cy="{y(r["us"]):.1f}" r="4.5" fill="{colour}" fill-opacity="0.8">'
                           f'<title>{r["suite"]} {r["geometry"]} m={m}: {r["us"]:.2f} us, {r["gbps"]:.0f} GB/s</title></circle>')
    legend = [(label, f'<circle cx="0" cy="-4" r="4.5" fill="{colour}"/>') for label, _, colour in SERIES]
    legend += [("read-only kernel, same run", '<path d="M-5 -4H5" stroke="#333" stroke-width="2"/>'),
               (f"{rate / 1e6:.2f} TB/s", '<path d="M-7 -4H7" stroke="#888" stroke-dasharray="5 4"/>')]
    for i, (label, mark) in enumerate(legend):
        out.append(f'<g transform="translate({WIDTH - RIGHT + 24} {TOP + 20 + 22 * i})">{mark}<text x="14">{label}</text></g>')
    out.append("</svg>")
    with open(target, "w", encoding="utf-8") as file:
        file.write("\n".join(out) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
