#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh clone to a running server: installs packages, builds, serves the bundled model on 127.0.0.1:8080.
# Arguments go to `qwen3-moe serve`: ./examples/qwen3_moe/serve.sh --port 9000 --model /path/to/checkpoint
# NIBBLE_MODELS="a/config.json;b/config.json" compiles more models in. Relative paths are the caller's.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)

"$root/tools/install_packages.sh"
build=${NIBBLE_BUILD_DIR:-$root/build/serve}
models=""
IFS=';' read -ra configs <<<"${NIBBLE_MODELS:-}"
for config in "${configs[@]}"; do
  models+="${models:+;}$(realpath "$config")"
done
# The server runs on the CPU so far: device code would only cost build time.
cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DNIBBLE_BUILD_TESTS=OFF -DNIBBLE_BUILD_BENCH=OFF \
  -DNIBBLE_CUDA="${NIBBLE_CUDA:-off}" -DNIBBLE_MODELS="$models"
cmake --build "$build" --target qwen3-moe

case " $* " in
  *" --model"* | *" --help "* | *" -h "*) exec "$build/bin/qwen3-moe" serve "$@" ;;
  *) exec "$build/bin/qwen3-moe" serve --model "$root/examples/qwen3_moe/models/tiny" "$@" ;;
esac
