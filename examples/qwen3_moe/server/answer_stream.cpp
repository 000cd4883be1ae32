// SPDX-License-Identifier: Apache-2.0
#include "answer_stream.hpp"

#include <deque>
#include <string_view>
#include <utility>

#include "answer_writer.hpp"
#include "text/detokenizer.hpp"
#include "text/reasoning_parser.hpp"
#include "text/stop_matcher.hpp"
#include "text/tool_call_parser.hpp"

namespace qwen3_moe {

struct answer_stream::impl {
  impl(const tokenizer& t, answer_options o)
      : split(o.split),
        open_tag(t.token_to_id(think_open)),
        close_tag(t.token_to_id(think_close)),
        detokenized(t),
        stops(std::move(o.stop)),
        reasoning(o.in_reasoning, open_tag.has_value() && close_tag.has_value()),
        tools(tool_set(o.tools)) {}

  // The tag is the end of the text so far, also when half a character in front of it was given up.
  void announce(std::int32_t token) {
    const bool opens = token == open_tag;
    if (!opens && token != close_tag) return;
    reasoning.announce_tag(total_bytes - (opens ? think_open : think_close).size());
  }

  void to_stops(answer_delta& out, std::string_view text) {
    if (over) return;
    const auto passed = stops.push(text);
    released_bytes += passed.size();
    to_parsers(out, passed);
    if (!stops.stopped()) return;
    over = true;
    end_parsers(out);
  }

  void to_parsers(answer_delta& out, std::string_view text) {
    if (text.empty()) return;
    if (!split) {
      out.content += text;
      return;
    }
    auto parts = reasoning.push(text);
    out.reasoning += parts.reasoning;
    add(out, tools.push(parts.content));
  }

  void end_parsers(answer_delta& out) {
    if (!split) return;
    auto parts = reasoning.finish();
    out.reasoning += parts.reasoning;
    add(out, tools.push(parts.content));
    add(out, tools.finish());
  }

  void add(answer_delta& out, std::vector<tool_event> events) {
    for (auto& event : events) {
      switch (event.kind) {
        case tool_event_kind::content:
          out.content += event.text;
          break;
        case tool_event_kind::call_begin:
          out.calls.push_back({.index = event.index,
                               .id = fresh_id("call_"),
                               .name = std::move(event.text),
                               .arguments = {}});
          break;
        case tool_event_kind::arguments:
          if (out.calls.empty() || out.calls.back().index != event.index)
            out.calls.push_back(
                {.index = event.index, .id = std::nullopt, .name = std::nullopt, .arguments = {}});
          out.calls.back().arguments += event.text;
          break;
        case tool_event_kind::call_end:
          break;
      }
    }
  }

  void settle(answer_delta& out) {
    while (!token_ends.empty() && token_ends.front() <= released_bytes) {
      token_ends.pop_front();
      ++out.settled_tokens;
    }
  }

  bool split;
  std::optional<std::int32_t> open_tag, close_tag;
  detokenizer detokenized;
  stop_matcher stops;
  reasoning_parser reasoning;
  tool_call_parser tools;
  bool over = false;
  int reasoning_tokens = 0;
  std::uint64_t total_bytes = 0;     // text of all tokens so far
  std::uint64_t released_bytes = 0;  // of it, past the stop strings
  std::deque<std::uint64_t> token_ends;
};

answer_stream::answer_stream(const tokenizer& tokens, answer_options options)
    : impl_(std::make_unique<impl>(tokens, std::move(options))) {}
answer_stream::~answer_stream() = default;
answer_stream::answer_stream(answer_stream&&) noexcept = default;
answer_stream& answer_stream::operator=(answer_stream&&) noexcept = default;

answer_delta answer_stream::push(std::int32_t token) {
  answer_delta out;
  auto& me = *impl_;
  if (me.over) return out;
  if (me.split && me.reasoning.inside()) ++me.reasoning_tokens;
  const auto text = me.detokenized.push(token);
  me.total_bytes += text.size();
  me.announce(token);
  // A token that ends inside a character is settled by the one that completes it.
  me.token_ends.push_back(me.total_bytes + (me.detokenized.pending() ? 1 : 0));
  me.to_stops(out, text);
  me.settle(out);
  return out;
}

answer_delta answer_stream::finish() {
  answer_delta out;
  auto& me = *impl_;
  if (me.over) return out;
  me.to_stops(out, me.detokenized.finish());
  if (me.over) return out;
  me.over = true;
  const auto rest = me.stops.finish();
  me.to_parsers(out, rest);
  me.end_parsers(out);
  out.settled_tokens = me.token_ends.size();
  me.token_ends.clear();
  return out;
}

bool answer_stream::stopped() const { return impl_->stops.stopped(); }
int answer_stream::reasoning_tokens() const { return impl_->reasoning_tokens; }
bool answer_stream::has_calls() const { return impl_->tools.calls() > 0; }

}  // namespace qwen3_moe
