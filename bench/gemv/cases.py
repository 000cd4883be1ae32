#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the list of benchmark cases: geometries given as FORMAT:NxK, or those of a model's config.json.

    cases.py [--geometry nvfp4:4096x2048]... [--config config.json] --output cases.inc

Kernels are compiled for their geometry, so a geometry is chosen when the benchmark is built:
    cmake -DNIBBLE_BENCH_GEOMETRIES="nvfp4:4096x2048;fp8:8192x1024" or -DNIBBLE_BENCH_CONFIG=path/to/config.json
"""
import argparse
import json
import re

TABLE = [
    ("nvfp4", 248320, 2048), ("nvfp4", 12288, 2048), ("nvfp4", 9216, 2048), ("nvfp4", 2048, 4096),
    ("nvfp4", 1024, 2048), ("nvfp4", 2048, 512), ("fp8", 12288, 2048), ("fp8", 9216, 2048), ("fp8", 2048, 4096),
    ("bf16", 256, 2048),
]
EXPERTS = [(2048, 512, 256, 8, True)]


def of_config(path):
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    config = config.get("text_config", config)
    hidden = config["hidden_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    gate = 2 if config.get("attn_output_gate", "linear_num_value_heads" in config) else 1
    dense = {("nvfp4", config["vocab_size"], hidden)}
    attention = [(gate * heads + 2 * kv_heads) * head]
    outputs = [heads * head]
    if "linear_num_value_heads" in config:
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        attention.append(2 * keys + 2 * values)
        outputs.append(values)
    for form in ("nvfp4", "fp8"):
        dense |= {(form, n, hidden) for n in attention} | {(form, hidden, k) for k in outputs}
    experts = []
    if config.get("num_experts"):
        dense.add(("bf16", config["num_experts"], hidden))
        experts.append((hidden, config["moe_intermediate_size"], config["num_experts"], config["num_experts_per_tok"],
                        bool(config.get("shared_expert_intermediate_size"))))
    return sorted(dense), experts


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--geometry", action="append", default=[])
    parser.add_argument("--config")
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    dense, experts = [], []
    for text in arguments.geometry:
        match = re.fullmatch(r"(nvfp4|fp8|bf16):(\d+)x(\d+)", text)
        if not match or int(match[2]) < 1 or int(match[3]) % 16 != 0 or int(match[3]) == 0:
            parser.error(f"{text}: a geometry is nvfp4|fp8|bf16:NxK with N at least 1 and K a multiple of 16")
        dense.append((match[1], int(match[2]), int(match[3])))
    if arguments.config:
        more, experts = of_config(arguments.config)
        dense += more
    if not dense and not experts:
        dense, experts = TABLE, EXPERTS
    with open(arguments.output, "w", encoding="utf-8") as file:
        for form, n, k in dense:
            file.write(f"BENCH_DENSE({form}, {n}, {k})\n")
        for hidden, inner, count, top, shared in experts:
            file.write(f"BENCH_EXPERTS({hidden}, {inner}, {count}, {top}, {str(shared).lower()})\n")


if __name__ == "__main__":
    main()
