// SPDX-License-Identifier: Apache-2.0
// Every kernel of a compiled model's table, for the checks of compiled code. MODEL and MODEL_HEADER name the
// model, NIBBLE_ARCHITECTURE the class of devices.
#include MODEL_HEADER
#include "model/cuda_families.cuh"

bool touch_everything();
const void* volatile last_kernel;

template <nibble::kv_format Kv>
bool touch() {
  using families = qwen3_moe::cuda_families<qwen3_moe::compiled::MODEL, Kv, nibble::default_device>;
  return families::table::for_each_kernel([](auto kernel, int, std::size_t, const char*) {
           last_kernel = reinterpret_cast<const void*>(kernel);
           return nibble::status::success();
         })
      .ok();
}

bool touch_everything() { return touch<nibble::kv_format::bf16>() && touch<nibble::kv_format::fp8>(); }
