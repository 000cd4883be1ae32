#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures the host backend on this machine and writes bench/results/host/*.json, then docs/benchmarks.md.
# Run it on an idle machine.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${NIBBLE_BUILD_DIR:-build/bench}
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DNIBBLE_BUILD_TESTS=OFF -DNIBBLE_CUDA=off
cmake --build "$build" --target bench_host bench_model
mkdir -p bench/results/host
stamp=(--commit "$(git rev-parse --short HEAD)" --date "$(date -I)")
"$build/bench/host/bench_host" --json bench/results/host/gemv.json "${stamp[@]}"
"$build/bench/model/bench_model" --json bench/results/host/model.json "${stamp[@]}"
python3 bench/write_tables.py
