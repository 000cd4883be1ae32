#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Times whole steps of the full-size models and starts, with all memory free and with 0.7 GiB left for caches, and writes
# bench/results/<gpu>/{decode,decode_share,prefill,prefill_share,startup}.json and the whole steps in offload.json.
#   bench/decode/run.sh FOLDER_OF_PROGRAMS RESULTS_FOLDER COMMIT      needs python3 and nvidia-smi
set -euo pipefail
programs=${1:?the folder with the bench_steps_* and bench_startup_* programs}
results=${2:?the folder for the JSON files}
commit=${3:?the commit that was built}
device=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
facts=",\"device\":\"$device\",\"driver\":\"$driver\",\"cuda\":\"13.0\",\"commit\":\"$commit\",\"date\":\"$(date +%F)\""
rows=$(mktemp)
for program in "$programs"/bench_steps_*; do
  "$program" --batch 1,2,4,8,16,32,64 --context 0,512,4096 --prefill 512,2048,8192 --facts "$facts" >>"$rows"
  "$program" --batch 1,8 --context 32768,131072 --prefill 1 --facts "$facts" >>"$rows"
  "$program" --batch 1,8 --context 512 --prefill 8192 --breakdown --facts "$facts" | grep _share >>"$rows"
done
"$programs"/bench_steps_qwen3_6_35b_a3b_bf16 --offload-gib 8,12,16 --first-token 1,64,8192 --ahead 1 --facts "$facts" >>"$rows"
"$programs"/bench_steps_qwen3_6_35b_a3b_bf16 --offload-gib 12 --ahead 1 --fetch kernel --first-token 1,64,8192 --facts "$facts" >>"$rows"
"$programs"/bench_steps_qwen3_6_35b_a3b_bf16 --offload-gib 12 --cpu --ahead 1 --facts "$facts" >>"$rows"
python3 "$(dirname "$0")/split_rows.py" "$rows" "$results"
python3 "$(dirname "$0")/plot.py" "$results/decode.json" "$results/decode.svg"
# A start of each kind three times, the median by its total; then the steps after it.
starts=$(mktemp -d)
for program in "$programs"/bench_startup_*; do
  for memory in "" "--limit-mib 700" "--left-mib 700"; do
    for i in 1 2; do "$program" $memory --steps 1 --facts "$facts" >"$starts/$i"; done
    # With a few slots a step of the large model fetches nearly all its experts.
    case "$program$memory" in *tiny* | *a3b) steps=10000 ;; *) steps=500 ;; esac
    "$program" $memory --steps $steps --facts "$facts" >"$starts/3"
    python3 "$(dirname "$0")/median_start.py" "$starts"/[1-3]
  done
done | sed -e '1 s/^/[\n/' -e '$ s/,$/\n]/' >"$results/startup.json"
