// SPDX-License-Identifier: Apache-2.0
// Attention of small and odd shapes against fp64, contexts far out, refusals.
#include "attention_checks.cuh"

int main(int argc, char** argv) {
  add_shape<tiny(kv_format::bf16)>("4/2 x 64", 500);
  add_shape<tiny(kv_format::fp8)>("4/2 x 64", 600);
  add_shape<thirds(kv_format::fp8)>("6/2 x 128", 700);
  add_shape<sixteenths(kv_format::bf16)>("16/1 x 64", 800);
  device_test::add("far", "bf16", [] { check_far<tiny(kv_format::bf16)>(900); });
  device_test::add("far", "fp8", [] { check_far<tiny(kv_format::fp8)>(910); });
  device_test::add("small", "16/2 x 256 bf16", [] { check_small<qwen36(kv_format::bf16)>(920); });
  device_test::add("small", "16/2 x 256 fp8", [] { check_small<qwen36(kv_format::fp8)>(930); });
  device_test::add("refusals", "parameters", check_refusals);
  return device_test::run(argc, argv);
}
