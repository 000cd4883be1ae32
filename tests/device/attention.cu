// SPDX-License-Identifier: Apache-2.0
// Attention of full-size models against fp64: decode, append and prefill, bf16 and FP8 caches, unequal
// contexts with shuffled pages, poison where no token is, rows that do not depend on their batch.
#include "attention_checks.cuh"

int main(int argc, char** argv) {
  add_shape<qwen36(kv_format::bf16)>("16/2 x 256", 100);
  add_shape<qwen36(kv_format::fp8)>("16/2 x 256", 200);
  add_shape<qwen3(kv_format::bf16)>("32/4 x 128", 300);
  return device_test::run(argc, argv);
}
