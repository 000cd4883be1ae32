// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "model/registry.hpp"
#include "nibble/io/safetensors.hpp"

namespace qwen3_moe {

namespace {

using nibble::io::safetensors_file;

template <class T>
std::vector<T> read_all(const safetensors_file& file, const nibble::io::tensor_entry& tensor) {
  std::vector<T> values(tensor.bytes / sizeof(T));
  file.read(tensor, 0, std::as_writable_bytes(std::span(values)));
  return values;
}

/// Log of the softmax's denominator, and the index of the largest value.
struct row_facts {
  double log_sum;
  std::size_t best;
};

row_facts facts_of(std::span<const float> row) {
  const auto best = static_cast<std::size_t>(std::max_element(row.begin(), row.end()) - row.begin());
  double sum = 0;
  for (const float x : row) sum += std::exp(static_cast<double>(x) - static_cast<double>(row[best]));
  return {static_cast<double>(row[best]) + std::log(sum), best};
}

/// Adds one row to the result; NaN anywhere makes the difference infinite, so it cannot pass.
void compare(std::span<const float> ours, std::span<const float> reference, verify_result& result,
             double& kl_sum, std::int64_t& agreed) {
  for (std::size_t i = 0; i < ours.size(); ++i) {
    const double difference = std::fabs(static_cast<double>(ours[i]) - static_cast<double>(reference[i]));
    result.largest_difference =
        std::isnan(difference) ? HUGE_VAL : std::max(result.largest_difference, difference);
  }
  const row_facts a = facts_of(reference), b = facts_of(ours);
  double kl = 0;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    const double log_p = static_cast<double>(reference[i]) - a.log_sum;
    const double log_q = static_cast<double>(ours[i]) - b.log_sum;
    kl += std::exp(log_p) * (log_p - log_q);
  }
  kl_sum += kl;
  agreed += a.best == b.best;
  ++result.positions;
}

}  // namespace

verify_result verify(loaded_model& model, const std::filesystem::path& reference) {
  const safetensors_file file(reference);
  model_runner& runner = model.runner();
  const runner_limits& limits = runner.limits();
  const auto vocab = static_cast<std::size_t>(limits.vocab_size);
  std::vector<std::int32_t> pages(static_cast<std::size_t>(limits.pages));
  std::iota(pages.begin(), pages.end(), 0);
  verify_result result;
  double kl_sum = 0;
  std::int64_t agreed = 0;
  for (;; ++result.prompts) {
    const std::string number = std::to_string(result.prompts);
    const auto* ids = file.find(number + ".input_ids");
    const auto* expected = file.find(number + ".logits");
    if (ids == nullptr && expected == nullptr) break;
    const auto fail = [&](const std::string& why) {
      throw nibble::format_error(reference.string() + ": prompt " + number + " " + why);
    };
    if (ids == nullptr || expected == nullptr) fail("lacks input_ids or logits");
    if (ids->type != nibble::io::dtype::i32 || ids->shape.size() != 1)
      fail("has input_ids that are not I32 [tokens]");
    const nibble::io::tensor_shape shape{ids->shape[0], vocab};
    if (expected->type != nibble::io::dtype::f32 || expected->shape != shape)
      fail("has logits " + nibble::io::to_string(expected->shape) + ", expected F32 " +
           nibble::io::to_string(shape));
    const auto tokens = read_all<std::int32_t>(file, *ids);
    if (tokens.size() > static_cast<std::size_t>(limits.context_tokens))
      fail("has " + std::to_string(tokens.size()) + " tokens, the context is " +
           std::to_string(limits.context_tokens));
    const auto want = read_all<float>(file, *expected);
    runner.clear_slot(0);
    std::vector<float> got;
    for (std::size_t done = 0; done < tokens.size();) {
      const std::size_t count = std::min(tokens.size() - done, static_cast<std::size_t>(limits.step_tokens));
      got.assign(count * vocab, std::nanf(""));
      const step_sequence sequence{std::span(tokens).subspan(done, count), static_cast<int>(done), 0, pages,
                                   wanted_logits::all};
      runner.step({&sequence, 1}, got);
      for (std::size_t i = 0; i < count; ++i)
        compare(std::span(got).subspan(i * vocab, vocab), std::span(want).subspan((done + i) * vocab, vocab),
                result, kl_sum, agreed);
      done += count;
    }
  }
  if (result.positions == 0)
    throw nibble::format_error(reference.string() + ": holds no 0.input_ids and 0.logits to compare with");
  result.mean_kl_divergence = kl_sum / static_cast<double>(result.positions);
  result.top1_agreement = static_cast<double>(agreed) / static_cast<double>(result.positions);
  return result;
}

}  // namespace qwen3_moe
