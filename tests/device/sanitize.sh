#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# compute-sanitizer over short runs of every device program: memcheck, racecheck, initcheck.
#   tests/device/sanitize.sh FOLDER [SECONDS] [TOOL…]      all tools in SECONDS together, 540 unless given
# Needs compute-sanitizer on the PATH or in COMPUTE_SANITIZER. NIBBLE_SHARED names the folder with tiny_model/;
# NIBBLE_LOGS, where given, gets the whole output of every run; NIBBLE_RUN_SECONDS is the longest run, 120 unless given;
# NIBBLE_RUNS takes only the programs that it matches as a regular expression. One line a run. Exit code 1 when a tool found
# something, 2 when a run could not be finished, 0 when all are clean.
#
# Left out, and why: groups that fill the device's memory or count it (the tool keeps its own there), that fault on
# purpose, that use CUPTI (the tool does too), 10,000 steps, the heads of full-size models, and kernels that wait for
# an answer of the CPU while it computes (fetch cpu, offload shared).
set -u
folder=${1:?the folder with the device_* programs}
budget=${2:-540}
shift; shift 2>/dev/null || true
tools=("$@")
[ ${#tools[@]} -gt 0 ] || tools=(memcheck racecheck initcheck)
sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
[ -x "$sanitizer" ] || { echo "no compute-sanitizer: put it on the PATH, or name it in COMPUTE_SANITIZER"; exit 2; }
export NIBBLE_TEST_QUICK=1

# program, arguments, tools it is for: m memcheck, r racecheck, i initcheck
runs='
gemv_variants          variants  m.i
gemv_variants_checked  variants  .r.
gemv_norm              tiny      mri
gemv_twice             twice     mri
gemv_top_k             small     mri
gemv_odd_0             odd       mri
gemv_odd_1             odd       mri
gemv_odd_2             odd       mri
gemv_real              fp8       mri
gemv_real              nvfp4     mri
gemv_real              bf16      mri
repack                 repack    mri
gemm                   gemm      m.i
gemm_checked           gemm      .r.
gemm                   large     m.i
gemm_checked           large     .r.
experts                experts   mri
experts_many           small     mri
experts_many           real      m..
attention_small        decode    mri
attention_small        prefill   mri
attention_small        pieces    m..
attention_small        small     mri
attention              decode    mri
attention              prefill   mri
delta                  small     mri
delta                  decode    mri
delta                  prefill   m.i
delta_chunks           small     mri
delta_chunks           chunks    m.i
router                 small     mri
router                 router    mri
sampling               small     mri
residency              small     mri
residency              real      m.i
offload                together  m..
offload                ahead     m..
offload                engine    m..
offload                engine_ahead m..
offload_engine         mixed     m..
fetch                  direct    mri
fetch                  beside    mri
fetch                  host      m..
fetch                  chain     m.i
arena                  arena     m..
graph                  graph     mri
startup                start     m..
trained_model          mixed     mri
trained_model          nvfp4     m..
trained_model          ct        m..
trained_offload        slots     mri
trained_offload        resize    m..
soak                   5         m..
full_width             full_width mri
'
# Rings in shared memory whose slots one lane releases for its warp, and warps that arrive at a named barrier without waiting
# (kernels/ring_release.hpp): racecheck follows neither. The programs *_checked let every lane arrive and every warp wait, and
# must be clean; elsewhere such reports are counted apart.
known_race='gemv_kernel|gemm_wide_kernel|experts_gate_up_wide|experts_down_wide'

begin=$SECONDS
longest=${NIBBLE_RUN_SECONDS:-120}
found=0
unfinished=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for tool in "${tools[@]}"; do
  while read -r program arguments for_tools; do
    [ -n "$program" ] || continue
    [[ $for_tools == *${tool:0:1}* ]] || continue
    title="$tool $program $arguments"
    [[ "$program $arguments" =~ ${NIBBLE_RUNS:-.} ]] || continue
    path=$folder/device_$program
    if [ ! -x "$path" ]; then unfinished=1; echo "missing     $title"; continue; fi
    left=$((budget - (SECONDS - begin)))
    if [ "$left" -lt 10 ]; then unfinished=1; echo "no time     $title"; continue; fi
    [ "$left" -lt "$longest" ] || left=$longest
    started=$SECONDS
    options=(--tool "$tool" --print-limit 200)
    # Tests call the driver in ways it must refuse.
    [ "$tool" != memcheck ] || options+=(--report-api-errors no)
    timeout -k 5 "$left" "$sanitizer" "${options[@]}" "$path" $arguments >"$log" 2>&1 </dev/null
    code=$?
    took="$((SECONDS - started)) s"
    [ -z "${NIBBLE_LOGS:-}" ] || cp "$log" "$NIBBLE_LOGS/${tool}_${program}_${arguments}.txt"
    summary=$(grep -E "ERROR SUMMARY|RACECHECK SUMMARY" "$log" | tail -n 1 | sed 's/^=* *//')
    if [ $code -eq 124 ] || [ $code -eq 137 ]; then unfinished=1; echo "too long    $title, $took"; continue; fi
    if [ -z "$summary" ]; then
      unfinished=1
      echo "no verdict  $title, $took: $(tail -n 1 "$log")"
      continue
    fi
    if grep -q "^skipped:" "$log"; then unfinished=1; echo "skipped     $title: $(grep -m 1 '^skipped:' "$log")"; continue; fi
    own=""
    failed=$(grep -c "^FAILED" "$log")
    [ "$failed" -eq 0 ] || own=" ($failed checks of its own failed under the tool: $(grep -m 1 '^FAILED' "$log"))"
    count=$(grep -oE "(SUMMARY: )[0-9]+" <<<"$summary" | grep -oE "[0-9]+" | head -n 1)
    known=0
    if [ "$tool" = racecheck ] && [ "${count:-0}" -ne 0 ] && [[ $program != *_checked ]]; then
      # Reports name the kernel on the line that says what was reported.
      reports=$(grep -E "^=+ +(Error|Warning|Info): .*(hazard|[Rr]ace)" "$log" | grep -vc "Maximum number of hazards")
      known=$(grep -E "^=+ +(Error|Warning|Info): .*(hazard|[Rr]ace)" "$log" | grep -cE "$known_race")
      [ "$reports" -eq 0 ] || [ "$known" -ne "$reports" ] || count=0
    fi
    if [ "${count:-1}" -eq 0 ]; then
      [ "$known" -eq 0 ] || own="$own ($known reports about slots of a ring or arrivals without a wait)"
      echo "clean       $title, $took$own"
    else
      found=1
      echo "FOUND       $title, $took: $summary$own"
      grep -E "^=+ +(Invalid|Uninitialized|Error|Warning|Race|Misaligned|Leaked|Program hit)" "$log" | sort | uniq -c | sort -rn | head -n 5
    fi
  done <<<"$runs"
done
echo "$((SECONDS - begin)) s"
[ $found -eq 0 ] || exit 1
[ $unfinished -eq 0 ] || exit 2
