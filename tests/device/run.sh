#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs every device test program of a folder on a machine that has a GPU but not the build tree.
#   tests/device/run.sh FOLDER [SECONDS]      each program gets SECONDS, 120 unless given
# NIBBLE_SHARED names the folder with tiny_model/ for the trained checkpoint. Exit code 1 when a program failed.
set -u
folder=${1:?the folder with the device_* programs}
seconds=${2:-120}
failed=0
for program in "$folder"/device_*; do
  [ -x "$program" ] || continue
  name=$(basename "$program")
  begin=$(date +%s)
  output=$(timeout "$seconds" "$program" 2>&1)
  code=$?
  took=$(($(date +%s) - begin))
  case $code in
    0) echo "passed  $name, $took s: $(tail -n 1 <<<"$output")" ;;
    4) echo "skipped $name: $(tail -n 1 <<<"$output")" ;;
    *) failed=1; echo "FAILED  $name, $took s, exit code $code"; grep -E "FAILED|failed" <<<"$output" | head -n 20; tail -n 3 <<<"$output" ;;
  esac
done
exit $failed
