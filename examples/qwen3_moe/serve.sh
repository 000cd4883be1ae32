#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh clone to a running server: installs packages, builds, serves the bundled model on 127.0.0.1:8080.
# Arguments go to `qwen3-moe serve`: ./examples/qwen3_moe/serve.sh --port 9000 --model /path/to/checkpoint
set -euo pipefail
cd "$(dirname "$0")/../.."

tools/install_packages.sh
build=${NIBBLE_BUILD_DIR:-build/serve}
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DNIBBLE_BUILD_TESTS=OFF -DNIBBLE_BUILD_BENCH=OFF \
  -DNIBBLE_CUDA="${NIBBLE_CUDA:-auto}" ${NIBBLE_MODELS:+-DNIBBLE_MODELS="$NIBBLE_MODELS"}
cmake --build "$build" --target qwen3-moe

arguments=("$@")
case " $* " in
  *" --model"*|*" --help "*|*" -h "*) ;;
  *) arguments=(--model examples/qwen3_moe/models/tiny "$@") ;;
esac
exec "$build/bin/qwen3-moe" serve "${arguments[@]}"
