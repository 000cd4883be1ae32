// SPDX-License-Identifier: Apache-2.0
/// \file
/// Reads the answers of the routes.
#pragma once

#include <string>
#include <vector>

#include "raw_client.hpp"
#include "support/catch.hpp"

namespace qwen3_moe::testing {

namespace json = boost::json;

inline const json::value& choice(const json::value& body, std::size_t index = 0) {
  return body.at("choices").at(index);
}
inline std::string text(const json::value& value) { return std::string(value.as_string()); }

/// What the chunks of a stream add up to.
struct streamed {
  std::string content, reasoning, finish_reason, role;
  std::vector<std::string> call_names, call_arguments, call_ids;
  json::value usage;
  std::size_t usage_chunks = 0, chunks_with_null_usage = 0, chunks = 0;
  bool done = false;
  std::string error;
  json::array logprobs;

  explicit streamed(const raw_response& response, std::size_t index = 0) {
    for (const auto& data : event_stream(response.body).data) {
      REQUIRE_FALSE(done);
      if (data == "[DONE]") {
        done = true;
        continue;
      }
      const auto chunk = json::parse(data).as_object();
      if (const auto* problem = chunk.if_contains("error")) {
        error = text(problem->at("message"));
        continue;
      }
      ++chunks;
      const auto& list = chunk.at("choices").as_array();
      if (list.empty()) {
        ++usage_chunks;
        usage = chunk.at("usage");
        CHECK_FALSE(finish_reason.empty());
        continue;
      }
      if (const auto* none = chunk.if_contains("usage"); none && none->is_null()) ++chunks_with_null_usage;
      if (list[0].at("index") != index) continue;
      if (chunk.at("object") == "text_completion") {
        content += text(list[0].at("text"));
      } else {
        const auto& delta = list[0].at("delta").as_object();
        if (const auto* value = delta.if_contains("role")) {
          CHECK(role.empty());
          CHECK(content.empty());
          role = text(*value);
        }
        if (const auto* value = delta.if_contains("content")) content += text(*value);
        if (const auto* value = delta.if_contains("reasoning_content")) reasoning += text(*value);
        if (const auto* value = delta.if_contains("tool_calls"))
          for (const auto& call : value->as_array()) {
            const auto at = call.at("index").to_number<std::size_t>();
            if (at >= call_names.size()) {
              call_names.push_back(text(call.at("function").at("name")));
              call_ids.push_back(text(call.at("id")));
              call_arguments.emplace_back();
            }
            call_arguments[at] += text(call.at("function").at("arguments"));
          }
        if (const auto& report = list[0].at("logprobs"); !report.is_null())
          for (const auto& item : report.at("content").as_array()) logprobs.push_back(item);
      }
      if (!list[0].at("finish_reason").is_null()) {
        CHECK(finish_reason.empty());
        finish_reason = text(list[0].at("finish_reason"));
      }
    }
  }
};

}  // namespace qwen3_moe::testing
