// SPDX-License-Identifier: Apache-2.0
#include "metrics_text.hpp"

#include <string_view>

namespace qwen3_moe {
namespace {

template <class Number>
void metric(std::string& out, std::string_view name, std::string_view type, std::string_view help,
            Number value) {
  out.append("# HELP ")
      .append(name)
      .append(" ")
      .append(help)
      .append("\n# TYPE ")
      .append(name)
      .append(" ")
      .append(type);
  out.append("\n").append(name).append(" ").append(std::to_string(value)).append("\n");
}

}  // namespace

std::string metrics_text(const engine_counters& counters) {
  std::string out;
  metric(out, "nibble_requests_running", "gauge", "Requests that hold a slot.", counters.running.load());
  metric(out, "nibble_requests_queued", "gauge", "Requests that wait for a slot or pages.",
         counters.queued.load());
  metric(out, "nibble_kv_pages_free", "gauge", "KV pages that no sequence holds.",
         counters.free_pages.load());
  metric(out, "nibble_slots_free", "gauge", "Sequence slots that are free.", counters.free_slots.load());
  metric(out, "nibble_steps_total", "counter", "Steps of the engine.", counters.steps.load());
  metric(out, "nibble_prompt_tokens_total", "counter", "Prompt tokens computed.",
         counters.prompt_tokens.load());
  metric(out, "nibble_completion_tokens_total", "counter", "Tokens chosen.",
         counters.completion_tokens.load());
  metric(out, "nibble_requests_aborted_total", "counter",
         "Requests cancelled by their client or by shutdown.", counters.aborted.load());
  metric(out, "nibble_requests_preempted_total", "counter",
         "Times a request gave its pages back and began again.", counters.preempted.load());
  metric(out, "nibble_requests_rejected_total", "counter", "Requests refused because the queue was full.",
         counters.rejected.load());
  metric(out, "nibble_expert_hits_total", "counter",
         "Routed experts that were on the GPU, a layer at a time.", counters.expert_hits.load());
  metric(out, "nibble_expert_misses_total", "counter",
         "Routed experts that had to be fetched or left to the CPU.", counters.expert_misses.load());
  out +=
      "# HELP nibble_requests_finished_total Requests that came to an end by themselves.\n"
      "# TYPE nibble_requests_finished_total counter\n";
  const auto finished = [&](std::string_view reason, std::uint64_t value) {
    out.append("nibble_requests_finished_total{reason=\"").append(reason).append("\"} ");
    out.append(std::to_string(value)).append("\n");
  };
  finished("stop", counters.finished_stop.load());
  finished("length", counters.finished_length.load());
  finished("error", counters.finished_error.load());
  return out;
}

}  // namespace qwen3_moe
