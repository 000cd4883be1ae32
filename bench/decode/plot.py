#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the decode steps of a model in bench/results/<gpu>/decode.json as an SVG: time a step over the bytes it must move.

    plot.py decode.json decode.svg [model, the first one unless given]
"""
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import roofline

COLOURS = ["#1f6fb4", "#2e8b57", "#e8a33d", "#d1495b", "#6a4c93", "#555555"]


def main(source, target, model=None):
    with open(source, encoding="utf-8") as file:
        rows = json.load(file)
    model = model or rows[0]["model"]
    rows = [r for r in rows if r["model"] == model]
    if not rows:
        sys.exit(f"{source}: no rows of {model}")
    contexts = sorted({r["context"] for r in rows})
    series = [(f"context {context}", colour, [(r["bytes"], r["us_per_step"], f"batch {r['batch']}: {r['us_per_step']:.0f} us, "
                                               f"{r['tokens_per_s']:.0f} tokens/s, {100 * r['floor_us'] / r['us_per_step']:.0f} % of the floor")
                                              for r in rows if r["context"] == context]) for context, colour in zip(contexts, COLOURS)]
    roofline.draw(target, f"{model} on {rows[0]['device']}: a decode step, batches of 1 to {max(r['batch'] for r in rows)}",
                  "bytes a step must move, MB", "microseconds a step", series, [], rows[0]["bytes"] / rows[0]["floor_us"])


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(*sys.argv[1:])
