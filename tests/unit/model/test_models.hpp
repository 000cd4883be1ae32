// SPDX-License-Identifier: Apache-2.0
/// \file
/// The compiled test models and checkpoints of random weights for them.
#pragma once

#include <filesystem>
#include <span>
#include <string>

#include "compiled/plain_qwen3.hpp"
#include "compiled/ratio1_bf16.hpp"
#include "compiled/ratio2_mixed.hpp"
#include "compiled/ratio3_nvfp4.hpp"
#include "compiled/ratio4_ct.hpp"
#include "model/registry.hpp"
#include "random_checkpoint.hpp"

namespace qwen3_moe {
/// The registry of the test models.
std::span<const compiled_model> test_models();

namespace test {

/// Puts the configuration of a test model into a folder.
inline void copy_config(const std::string& model, const std::filesystem::path& folder) {
  std::filesystem::copy_file(std::string(NIBBLE_SOURCE_DIR) + "/tests/data/models/" + model + ".json",
                             folder / "config.json", std::filesystem::copy_options::overwrite_existing);
}

template <class Config>
void write_random_checkpoint(const std::filesystem::path& folder, const checkpoint_style& style,
                             unsigned seed) {
  copy_config(Config::name, folder);
  write_tensors(random_tensors<Config>(style, seed), folder / "model.safetensors");
}

}  // namespace test
}  // namespace qwen3_moe
