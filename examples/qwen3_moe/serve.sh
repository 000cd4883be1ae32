#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh clone to a running server: installs packages, builds, serves the bundled model on 127.0.0.1:8080.
# Arguments go to `qwen3-moe serve`: ./examples/qwen3_moe/serve.sh --port 9000 --model /path/to/checkpoint
# NIBBLE_MODELS="a/config.json;b/config.json" compiles more models in. Relative paths are the caller's. With a GPU in
# the machine and an nvcc of CUDA 13 the GPU path is built too; NIBBLE_CUDA=off|auto|on decides otherwise.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)

"$root/tools/install_packages.sh"
build=${NIBBLE_BUILD_DIR:-$root/build/serve}
models=""
IFS=';' read -ra configs <<<"${NIBBLE_MODELS:-}"
for config in "${configs[@]}"; do
  models+="${models:+;}$(realpath "$config")"
done
# Device code takes minutes to compile, so it is built where there is a GPU that could run it.
cuda=off
if nvidia-smi -L 2>/dev/null | grep -q GPU; then cuda=auto; fi
cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DNIBBLE_BUILD_TESTS=OFF -DNIBBLE_BUILD_BENCH=OFF \
  -DNIBBLE_CUDA="${NIBBLE_CUDA:-$cuda}" -DNIBBLE_MODELS="$models"
cmake --build "$build" --target qwen3-moe

case " $* " in
  *" --model"* | *" --help "* | *" -h "*) exec "$build/bin/qwen3-moe" serve "$@" ;;
  *) exec "$build/bin/qwen3-moe" serve --model "$root/examples/qwen3_moe/models/tiny" "$@" ;;
esac
