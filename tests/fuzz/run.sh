#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs every fuzz target under ASan and UBSan: tests/fuzz/run.sh [seconds for each, 300] [target…]
# Needs clang with libFuzzer (Debian: clang, libclang-rt-14-dev or libclang-rt-18-dev). Findings stay in the work folder.
set -euo pipefail
cd "$(dirname "$0")/../.."
seconds=${1:-300}
shift || true
build=${NIBBLE_BUILD_DIR:-build/fuzz}
cmake --preset fuzz -B "$build"
cmake --build "$build"
targets=("$@")
[ "${#targets[@]}" -gt 0 ] || targets=(safetensors shard_index config tokenizer template chat_request)
failed=0
for target in "${targets[@]}"; do
  work="$build/fuzz-work/$target"
  mkdir -p "$work/corpus"
  if "$build/tests/fuzz/fuzz_$target" -max_total_time="$seconds" -max_len=65536 -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
      -artifact_prefix="$work/" "$work/corpus" "tests/fuzz/corpus/$target" >"$work/log" 2>&1; then
    echo "$target: $(grep -o 'number_of_executed_units: [0-9]*' "$work/log") in $seconds s, nothing found"
  else
    echo "$target: FOUND, see $work/log"
    failed=1
  fi
done
exit "$failed"
