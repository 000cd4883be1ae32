// SPDX-License-Identifier: Apache-2.0
// A model of Qwen3.6-35B-A3B's widths, four layers, random weights: each module on the GPU against the host
// backend, and the whole pass. JSON rows on stdout, the bounds are those of support/module_error.hpp.
//   device_full_width [full_width] [--facts ',"device":…']
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "compiled/full_width.hpp"
#include "device_test.cuh"
#include "full_width_steps.hpp"
#include "model/cuda_model.cuh"
#include "nibble/core/bf16.hpp"
#include "support/pooled_weights.hpp"

namespace {

using config = qwen3_moe::compiled::full_width;
constexpr const qwen3_moe::model_config& c = config::value;

/// The CUDA backend as module_walk drives it: arrays of a step sent from here, activations read after each
/// module.
class device_subject {
 public:
  using core_type = qwen3_moe::cuda_core<config, nibble::kv_format::bf16>;
  using backend_type = core_type::backend_type;

  explicit device_subject(nibble::startup::engine<core_type> engine)
      : engine_(std::move(engine)),
        words_(static_cast<std::size_t>(core().backend().step_layout().words())),
        step_(core().backend().step_layout(), words_.data()) {}

  [[nodiscard]] backend_type& backend() { return core().backend(); }
  [[nodiscard]] const qwen3_moe::causal_lm<config>& lm() { return core().model(); }
  [[nodiscard]] bool has_pages(int pages) {
    return engine_.context().plan().kv_pages >= static_cast<std::uint64_t>(pages);
  }

  void clear_slot(int slot) {
    NIBBLE_CUDA_CHECK(
        cudaMemsetAsync(backend().states + static_cast<std::size_t>(slot) * backend_type::slot_state_bytes, 0,
                        backend_type::slot_state_bytes, backend().stream()));
  }

  void begin(std::span<const qwen3_moe::step_sequence> sequences) {
    step_.compose(sequences);
    copy(backend().step_words(), words_.data(), words_.size());
    const int stride = core().sizes().page_stride;
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      // Rows are in the caller's order only where sequences of one token come first.
      NIBBLE_CHECK(step_.order()[i] == static_cast<int>(i));
      const auto& s = sequences[i];
      const auto tokens = static_cast<std::size_t>(s.position) + s.tokens.size();
      copy(backend().page_table() + i * static_cast<std::size_t>(stride), s.pages.data(),
           (tokens + qwen3_moe::device_page_tokens - 1) / qwen3_moe::device_page_tokens);
    }
    backend().begin_step(step_.rows(), step_.decodes(), step_.sequences());
    backend().want_rows(0, std::min(step_.wanted(), core().sizes().logit_rows));
  }

  [[nodiscard]] std::vector<float> read(const qwen3_moe::device_rows& rows) {
    return floats(rows.data, static_cast<std::size_t>(rows.rows) * static_cast<std::size_t>(rows.columns));
  }
  [[nodiscard]] std::vector<float> read(const qwen3_moe::device_logits& logits) {
    constexpr std::size_t stride = qwen3_moe::logit_stride_of(c), width = c.vocab_size;
    const auto raw = values(logits.data, static_cast<std::size_t>(logits.rows) * stride);
    std::vector<float> out;
    for (std::size_t row = 0; row < static_cast<std::size_t>(logits.rows); ++row)
      out.insert(out.end(), raw.begin() + static_cast<std::ptrdiff_t>(row * stride),
                 raw.begin() + static_cast<std::ptrdiff_t>(row * stride + width));
    return out;
  }

  [[nodiscard]] qwen3_moe::test::routed_rows routed() {
    const qwen3_moe::device_workspace at = core().workspace_layout();
    const auto rows = static_cast<std::size_t>(step_.rows());
    const auto place = [&]<class T>(const T*, std::uint64_t offset) {
      return reinterpret_cast<const T*>(core().workspace() + offset);
    };
    qwen3_moe::test::routed_rows out;
    out.ids =
        values(place(static_cast<const std::int32_t*>(nullptr), at.expert_ids), rows * c.experts_per_token);
    out.weights =
        values(place(static_cast<const float*>(nullptr), at.expert_weights), rows * c.experts_per_token);
    out.shared_weights = values(place(static_cast<const float*>(nullptr), at.shared_weights), rows);
    out.normed = floats(place(static_cast<const __nv_bfloat16*>(nullptr), at.normed), rows * c.hidden_size);
    // The host's experts are taken by these: ids that are none would be read out of bounds.
    for (const auto id : out.ids)
      if (id < 0 || id >= c.experts) throw nibble::error("the router chose expert " + std::to_string(id));
    return out;
  }

  /// Logits of all wanted rows, as many at a time as the device's buffer holds.
  [[nodiscard]] std::vector<float> head(int rows) {
    std::vector<float> out;
    for (int done = 0; done < rows;) {
      const int count = std::min(rows - done, core().sizes().logit_rows);
      auto& b = backend();
      b.want_rows(done, count);
      b.project(lm().lm_head, b.normed(lm().model.norm, b.selected), b.logits);
      const std::vector<float> part = read(b.logits);
      out.insert(out.end(), part.begin(), part.end());
      done += count;
    }
    return out;
  }

 private:
  [[nodiscard]] core_type& core() { return engine_.model(); }

  void copy(std::int32_t* to, const std::int32_t* from, std::size_t count) {
    NIBBLE_CUDA_CHECK(cudaMemcpyAsync(to, from, 4 * count, cudaMemcpyHostToDevice, backend().stream()));
    NIBBLE_CUDA_CHECK(cudaStreamSynchronize(backend().stream()));
  }
  template <class T>
  [[nodiscard]] std::vector<T> values(const T* from, std::size_t count) {
    NIBBLE_GOOD(backend().result());
    std::vector<T> out(count);
    NIBBLE_CUDA_CHECK(
        cudaMemcpyAsync(out.data(), from, sizeof(T) * count, cudaMemcpyDeviceToHost, backend().stream()));
    NIBBLE_CUDA_CHECK(cudaStreamSynchronize(backend().stream()));
    return out;
  }
  [[nodiscard]] std::vector<float> floats(const __nv_bfloat16* from, std::size_t count) {
    std::vector<float> out;
    out.reserve(count);
    for (const auto bits : values(reinterpret_cast<const std::uint16_t*>(from), count))
      out.push_back(nibble::bf16::decode(bits));
    return out;
  }

  nibble::startup::engine<core_type> engine_;
  std::vector<std::int32_t> words_;
  qwen3_moe::device_step step_;
};

int run(const std::string& facts) {
  qwen3_moe::test::pooled_weights<config> weights(7);
  auto bound = weights.lm();
  nibble::start_options options;
  options.request.context_tokens = full_width::context_tokens;
  options.request.max_running = full_width::slots;
  options.request.step_tokens = full_width::step_tokens;
  options.request.captured_sizes = {1, full_width::slots};
  options.request.kv_bytes =  // every sequence at full length, and dummy pages
      (full_width::slots * full_width::pages_each + 16) * device_subject::backend_type::page_bytes;
  options.log = [](std::string_view line) {
    std::fprintf(stderr, "%.*s\n", static_cast<int>(line.size()), line.data());
  };
  device_subject subject(nibble::startup::start<device_subject::core_type>(
      std::move(options), qwen3_moe::source_of(bound, 0), full_width::context_tokens));
  if (!subject.has_pages(full_width::slots * full_width::pages_each)) {
    std::printf("FAILED: the plan has fewer pages than the sequences need\n");
    return 1;
  }
  nibble::host::thread_pool pool;
  const int bad = full_width::compare<config>(weights.lm(), subject, pool, facts) + device_test::failures();
  std::printf("%d failed checks\n", bad);
  return bad == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) try {
  std::string facts;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--facts") == 0 && i + 1 < argc) {
      facts = argv[++i];
    } else if (std::strcmp(argv[i], "full_width") != 0) {
      std::fprintf(stderr, "device_full_width [full_width] [--facts ',\"device\":\"…\"']\n");
      return 2;
    }
  }
  device_test::need_device();
  device_test::current() = "full_width";
  return run(facts);
} catch (const std::exception& problem) {
  std::printf("FAILED: %s\n", problem.what());
  return 1;
}
