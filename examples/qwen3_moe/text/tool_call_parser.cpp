// SPDX-License-Identifier: Apache-2.0
#include "tool_call_parser.hpp"

#include <algorithm>
#include <utility>

namespace qwen3_moe {
namespace {

constexpr std::string_view call_open = "<tool_call>", call_close = "</tool_call>",
                           function_open = "<function=", function_close = "</function>",
                           parameter_open = "<parameter=", parameter_close = "</parameter>";
constexpr std::string_view white_space = " \t\r\n";
constexpr std::size_t longest_name_bytes = 256;

// Is `tag` at the front of `s`, or may it be when more comes?
enum class presence { no, maybe, yes };
presence starts_with(std::string_view s, std::string_view tag) {
  if (s.starts_with(tag)) return presence::yes;
  return tag.starts_with(s) ? presence::maybe : presence::no;
}

// The name in <function=NAME> or <parameter=NAME>: where its ">" is, or npos while it may come, or `bad`.
constexpr std::size_t bad = std::string_view::npos - 1;
std::size_t name_end(std::string_view s) {
  const std::size_t end = s.find_first_of(">\n\r<");
  if (end == s.npos) return s.size() > longest_name_bytes ? bad : s.npos;
  return s[end] == '>' && end > 0 && end <= longest_name_bytes &&
                 s.substr(0, end).find_first_not_of(white_space) != s.npos
             ? end
             : bad;
}

std::string_view trimmed(std::string_view s) {
  const std::size_t begin = s.find_first_not_of(white_space);
  return begin == s.npos ? std::string_view() : s.substr(begin, s.find_last_not_of(white_space) - begin + 1);
}

}  // namespace

void tool_call_parser::emit(events& out, tool_event_kind kind, std::string_view text) {
  const std::size_t index = kind == tool_event_kind::content ? calls_ : calls_ - 1;
  if (!out.empty() && out.back().kind == kind && out.back().index == index &&
      (kind == tool_event_kind::content || kind == tool_event_kind::arguments)) {
    out.back().text += text;
  } else {
    out.push_back({kind, index, std::string(text)});
  }
}

// White space is held until text follows; in front of the first text behind a call it may be dropped.
void tool_call_parser::emit_content(events& out, std::string_view text) {
  const std::size_t last = text.find_last_not_of(white_space);
  if (last == text.npos) {
    space_ += text;
    return;
  }
  if (calls_ > 0 && !any_content_) {
    space_.clear();
    text.remove_prefix(text.find_first_not_of(white_space));
  }
  const std::size_t keep = text.find_last_not_of(white_space) + 1;
  if (!space_.empty()) emit(out, tool_event_kind::content, std::exchange(space_, {}));
  emit(out, tool_event_kind::content, text.substr(0, keep));
  space_ = text.substr(keep);
  any_content_ = since_call_ = true;
}

void tool_call_parser::begin_call(events& out, std::string_view name) {
  opening_.clear();
  space_.clear();
  function_ = name;
  given_.clear();
  since_call_ = false;
  ++calls_;
  emit(out, tool_event_kind::call_begin, name);
}

void tool_call_parser::end_call(events& out) {
  emit(out, tool_event_kind::arguments, given_.empty() ? "{}" : "}");
  emit(out, tool_event_kind::call_end, {});
}

// What was taken for a call stays content.
bool tool_call_parser::refuse(events& out) {
  emit_content(out, std::exchange(opening_, {}));
  state_ = state::refused;
  return true;
}

bool tool_call_parser::step_text(events& out, bool last) {
  const std::string_view s = rest();
  std::size_t end = 0;
  while ((end = s.find('<', end)) != s.npos) {
    const presence p = starts_with(s.substr(end), call_open);
    if (p == presence::yes || (p == presence::maybe && !last)) break;
    ++end;
  }
  const bool open = end != s.npos && s.substr(end).starts_with(call_open);
  if (end == s.npos) end = s.size();
  emit_content(out, s.substr(0, end));
  consume(end);
  if (!open) return false;
  opening_ = call_open;
  consume(call_open.size());
  state_ = state::opened;
  return true;
}

bool tool_call_parser::step_opened(events& out, bool last) {
  const std::size_t space = std::min(rest().find_first_not_of(white_space), rest().size());
  opening_ += rest().substr(0, space);
  consume(space);
  const std::string_view s = rest();
  if (s.empty()) return last && refuse(out);
  const presence p = starts_with(s, function_open);
  if (p == presence::maybe && !last) return false;
  if (p == presence::yes) {
    opening_ += function_open;
    consume(function_open.size());
    state_ = state::function_name;
    return true;
  }
  if (s[0] != '{') return refuse(out);
  state_ = state::json_object;
  brackets_ = 0;
  in_string_ = escaped_ = false;
  return true;
}

bool tool_call_parser::step_function_name(events& out, bool last) {
  const std::string_view s = rest();
  const std::size_t end = name_end(s);
  if (end == s.npos && !last) return false;
  if (end == bad || end == s.npos || !tools_.declares(trimmed(s.substr(0, end)))) return refuse(out);
  const std::string name(trimmed(s.substr(0, end)));
  consume(end + 1);
  begin_call(out, name);
  state_ = state::parameters;
  return true;
}

bool tool_call_parser::step_json(events& out, bool last) {
  const std::string_view s = rest();
  for (; scanned_ < s.size(); ++scanned_) {
    const char c = s[scanned_];
    if (in_string_) {
      if (escaped_)
        escaped_ = false;
      else if (c == '\\')
        escaped_ = true;
      else if (c == '"')
        in_string_ = false;
      continue;
    }
    if (c == '"') in_string_ = true;
    if (c == '{' || c == '[') ++brackets_;
    if (c == '<') return refuse(out);  // no JSON
    if ((c == '}' || c == ']') && --brackets_ == 0) {
      const auto call = read_json_call(s.substr(0, scanned_ + 1));
      if (!call || !tools_.declares(call->name)) return refuse(out);
      consume(scanned_ + 1);
      begin_call(out, call->name);
      emit(out, tool_event_kind::arguments, call->arguments);
      emit(out, tool_event_kind::call_end, {});
      state_ = state::closing;
      return true;
    }
  }
  return last && refuse(out);
}

bool tool_call_parser::step_refused(events& out, bool last) {
  const std::string_view s = rest();
  std::size_t end = 0;
  while ((end = s.find('<', end)) != s.npos) {
    const presence p = starts_with(s.substr(end), call_close);
    if (p == presence::yes || (p == presence::maybe && !last)) break;
    ++end;
  }
  const bool closed = end != s.npos && s.substr(end).starts_with(call_close);
  if (end == s.npos) end = s.size();
  if (closed) end += call_close.size();
  emit_content(out, s.substr(0, end));
  consume(end);
  if (closed) state_ = state::text;
  return closed;
}

bool tool_call_parser::step_parameters(events& out, bool last) {
  while (true) {
    const std::string_view s = rest();
    const std::size_t at = s.find('<');
    if (at == s.npos) {
      consume(s.size());
    } else {
      consume(at);
      const std::string_view tag = rest();
      if (tag.starts_with(parameter_open)) {
        consume(parameter_open.size());
        state_ = state::parameter_name;
        return true;
      }
      if (tag.starts_with(function_close)) {
        consume(function_close.size());
        end_call(out);
        state_ = state::closing;
        return true;
      }
      if (tag.starts_with(call_close) || tag.starts_with(call_open) || tag.starts_with(function_open)) {
        end_call(out);
        state_ = state::closing;
        return true;
      }
      bool may_be_tag = false;
      for (const std::string_view t : {parameter_open, function_close, call_close, call_open, function_open})
        may_be_tag |= t.starts_with(tag);
      if (!may_be_tag) {
        consume(1);
        continue;
      }
      if (last) consume(tag.size());
    }
    if (!last) return false;
    end_call(out);
    state_ = state::text;
    return true;
  }
}

bool tool_call_parser::step_parameter_name(events& out, bool last) {
  const std::string_view s = rest();
  const std::size_t end = name_end(s);
  if (end == s.npos && !last) return false;
  if (end == bad || end == s.npos) {  // dropped, with whatever text follows up to the next tag
    state_ = state::parameters;
    return true;
  }
  parameter_ = trimmed(s.substr(0, end));
  consume(end + 1);
  value_.clear();
  value_started_ = false;
  dropped_ = given_.contains(parameter_);
  const std::uint8_t types = tools_.types_of(function_, parameter_);
  streams_ = !dropped_ && types == string_argument;
  if (streams_)
    emit(out, tool_event_kind::arguments, (given_.empty() ? "{" : ",") + json_string(parameter_) + ":\"");
  state_ = state::value;
  return true;
}

void tool_call_parser::add_to_value(events& out, std::string_view text) {
  if (text.empty() || dropped_) return;
  if (!streams_) {
    value_ += text;
    return;
  }
  std::string escaped;
  append_json_escaped(escaped, text);
  emit(out, tool_event_kind::arguments, escaped);
}

void tool_call_parser::end_value(events& out) {
  if (streams_)
    emit(out, tool_event_kind::arguments, "\"");
  else if (!dropped_)
    emit(out, tool_event_kind::arguments,
         (given_.empty() ? "{" : ",") + json_string(parameter_) + ":" +
             argument_json(value_, tools_.types_of(function_, parameter_)));
  given_.insert(parameter_);
  state_ = state::parameters;
}

bool tool_call_parser::step_value(events& out, bool last) {
  while (true) {
    const std::string_view s = rest();
    const std::size_t at = std::min(s.find_first_of("\r\n<"), s.size());
    add_to_value(out, s.substr(0, at));
    value_started_ |= at > 0;
    consume(at);
    if (at == s.size()) {
      if (last) end_value(out);
      return last;
    }
    // Here is a line end, perhaps with a tag behind it, or a tag, or text that looks like one.
    const std::string_view here = rest();
    const std::size_t line_end = here[0] == '<' ? 0 : here.starts_with("\r\n") ? 2 : 1;
    const std::string_view tag = here.substr(line_end);
    const bool lone_return = here[0] == '\r' && line_end == 1 && !tag.empty();
    bool ends = false, may_end = tag.empty();
    for (const std::string_view t : {parameter_close, function_close, call_close, parameter_open}) {
      if (tag.empty() || lone_return || (t == parameter_open && line_end == 0 && value_started_)) continue;
      const presence p = starts_with(tag, t);
      ends |= p == presence::yes;
      may_end |= p == presence::maybe;
    }
    if (may_end && !ends && !last) return false;
    if (ends ||
        (may_end && tag.size() != 1)) {  // an answer that ends inside a tag has the value end before it
      consume(ends ? line_end + (tag.starts_with(parameter_close) ? parameter_close.size() : 0)
                   : here.size());
      end_value(out);
      return true;
    }
    const std::size_t n = std::max<std::size_t>(line_end, 1);
    if (line_end == 0 || lone_return || value_started_) add_to_value(out, here.substr(0, n));
    value_started_ = true;
    consume(n);
  }
}

bool tool_call_parser::step_closing(events&, bool last) {
  const std::size_t space = std::min(rest().find_first_not_of(white_space), rest().size());
  space_ += rest().substr(0, space);
  consume(space);
  const std::string_view tag = rest();
  if (tag.empty()) return false;
  const presence closes = starts_with(tag, call_close), another = starts_with(tag, function_open);
  if (closes == presence::yes) {
    space_.clear();
    consume(call_close.size());
    state_ = state::text;
    return true;
  }
  if (another == presence::yes) {
    space_.clear();
    opening_ = function_open;
    consume(function_open.size());
    state_ = state::function_name;
    return true;
  }
  if ((closes == presence::maybe || another == presence::maybe) && !last) return false;
  if (closes == presence::maybe && tag.size() > 1)
    consume(tag.size());  // the answer ends inside the closing tag
  state_ = state::text;
  return true;
}

// One step; false when more text is needed.
bool tool_call_parser::step(events& out, bool last) {
  switch (state_) {
    case state::no_tools:
      if (at_ < held_.size()) emit(out, tool_event_kind::content, rest());
      consume(held_.size() - at_);
      return false;
    case state::text:
      return step_text(out, last);
    case state::opened:
      return step_opened(out, last);
    case state::function_name:
      return step_function_name(out, last);
    case state::json_object:
      return step_json(out, last);
    case state::refused:
      return step_refused(out, last);
    case state::parameters:
      return step_parameters(out, last);
    case state::parameter_name:
      return step_parameter_name(out, last);
    case state::value:
      return step_value(out, last);
    case state::closing:
      return step_closing(out, last);
  }
  return false;
}

std::vector<tool_event> tool_call_parser::push(std::string_view text) {
  events out;
  held_ += text;
  while (step(out, false)) {
  }
  // Forget what is consumed, but not so often that it costs more than it frees.
  if (at_ > held_.size() / 2) {
    held_.erase(0, at_);
    at_ = 0;
  }
  return out;
}

std::vector<tool_event> tool_call_parser::finish() {
  events out;
  while (step(out, true)) {
  }
  // White space at the very end belongs to the content unless a call is in front of it.
  if (!space_.empty() && (calls_ == 0 || since_call_)) emit(out, tool_event_kind::content, space_);
  space_.clear();
  held_.clear();
  at_ = scanned_ = 0;
  return out;
}

}  // namespace qwen3_moe
