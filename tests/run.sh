#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs packages, builds, and runs every test this machine can run. Ends with "N passed, N failed, N skipped".
#   tests/run.sh [ctest arguments…]        NIBBLE_BUILD_DIR and NIBBLE_CMAKE_ARGS choose another build.
set -euo pipefail
cd "$(dirname "$0")/.."

tools/install_packages.sh catch2 ccache curl python3 zlib1g-dev
build=${NIBBLE_BUILD_DIR:-build/test}
# shellcheck disable=SC2086 # several arguments in one variable
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER_LAUNCHER=ccache \
  -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache -DNIBBLE_BUILD_BENCH=OFF ${NIBBLE_CMAKE_ARGS:-}
cmake --build "$build"

log="$build/tests.log"
status=0
ctest --test-dir "$build" --output-on-failure -j "$(nproc)" "$@" 2>&1 | tee "$log" || status=$?
python3 tests/support/count_results.py "$log"
exit "$status"
