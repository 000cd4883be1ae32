// SPDX-License-Identifier: Apache-2.0
#include "reasoning_parser.hpp"

#include <algorithm>

namespace qwen3_moe {
namespace {

constexpr std::string_view white_space = " \t\r\n";

}  // namespace

bool ends_inside_reasoning(std::string_view prompt) noexcept {
  const std::size_t last = prompt.find_last_not_of(white_space);
  return last != prompt.npos && prompt.substr(0, last + 1).ends_with(think_open);
}

void reasoning_parser::consume(std::size_t bytes) {
  held_.erase(0, bytes);
  consumed_ += bytes;
  scanned_ = 0;
}

bool reasoning_parser::is_tag_at(std::size_t offset) {
  if (!by_token_) return true;
  while (!announced_.empty() && announced_.front() < consumed_ + offset) announced_.pop_front();
  return !announced_.empty() && announced_.front() == consumed_ + offset;
}

// One step; false when more text is needed. `last`: no more will come.
bool reasoning_parser::run(reasoning_delta& out, bool last) {
  switch (state_) {
    case state::start: {
      const std::size_t at = held_.find_first_not_of(white_space, scanned_);
      scanned_ = std::min(at, held_.size());
      if (at != held_.npos) {
        const std::string_view rest = std::string_view(held_).substr(at);
        if (rest.starts_with(think_open) && is_tag_at(at)) {
          consume(at + think_open.size());
          state_ = state::reasoning_start;
          return true;
        }
        if (!think_open.starts_with(rest) || last) state_ = state::content;
      } else if (last) {
        state_ = state::content;
      }
      return state_ != state::start;
    }
    case state::reasoning_start: {
      const std::size_t at = std::min(held_.find_first_not_of(white_space), held_.size());
      const bool more = at < held_.size();
      consume(at);
      if (more) state_ = state::reasoning;
      return more;
    }
    case state::reasoning: {
      // Up to the tag, or to what may be the start of it, without white space in front.
      std::size_t end = scanned_;
      bool found = false;
      while ((end = held_.find('<', end)) != held_.npos) {
        const std::string_view rest = std::string_view(held_).substr(end);
        found = rest.starts_with(think_close) && is_tag_at(end);
        if (found || (think_close.starts_with(rest) && rest.size() < think_close.size() && !last)) break;
        ++end;
      }
      if (end == held_.npos) end = held_.size();
      // In front of scanned_ there is only white space.
      const std::string_view fresh = std::string_view(held_).substr(scanned_, end - scanned_);
      const std::size_t keep = fresh.find_last_not_of(white_space);
      const std::size_t text = keep == fresh.npos ? 0 : scanned_ + keep + 1;
      out.reasoning.append(held_, 0, text);
      if (found) {
        consume(end + think_close.size());
        state_ = state::content_start;
        return true;
      }
      if (last) {
        consume(held_.size());
      } else {
        consume(text);
        scanned_ = end - text;
      }
      return false;
    }
    case state::content_start: {
      const std::size_t at = std::min(held_.find_first_not_of("\r\n"), held_.size());
      const bool more = at < held_.size();
      consume(at);
      if (more) state_ = state::content;
      return more;
    }
    case state::content:
      out.content += held_;
      consume(held_.size());
      return false;
  }
  return false;
}

reasoning_delta reasoning_parser::push(std::string_view text) {
  reasoning_delta out;
  held_ += text;
  while (!held_.empty() && run(out, false)) {
  }
  return out;
}

reasoning_delta reasoning_parser::finish() {
  reasoning_delta out;
  while (!held_.empty() && run(out, true)) {
  }
  return out;
}

}  // namespace qwen3_moe
