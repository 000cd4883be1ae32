// SPDX-License-Identifier: Apache-2.0
/// \file
/// Finds tool calls in the content of an answer, while it streams.
#pragma once

#include <cstddef>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tool_arguments.hpp"

namespace qwen3_moe {

enum class tool_event_kind {
  content,     ///< text outside calls
  call_begin,  ///< text is the function's name
  arguments,   ///< text is the next piece of the call's arguments
  call_end
};

struct tool_event {
  tool_event_kind kind;
  std::size_t index;  ///< of the call within the answer, from 0; of content, the number of calls so far
  std::string text;
  bool operator==(const tool_event&) const = default;
};

/// Reads both forms that the Qwen families write:
///
///     <tool_call>                             <tool_call>
///     <function=NAME>                         {"name": "NAME", "arguments": {…}}
///     <parameter=KEY>                         </tool_call>
///     VALUE
///     </parameter>
///     </function>
///     </tool_call>
///
/// All pieces of a call's arguments together are one JSON object, always valid, however the answer goes wrong
/// or ends. The events, neighbours of one kind joined, do not depend on how the text is cut. Linear time.
///
/// Rules where models deviate (the XML form has no escapes, so a rule is needed):
/// - A value ends at the first </parameter>, </function> or </tool_call>, or at <parameter= at the start of a
/// line, or
///   with the answer. <tool_call> and <function= inside a value are text. One line end at each end of it is
///   dropped.
/// - A missing </function> or </tool_call> is supplied by the next <function=, <tool_call>, or the end of the
/// answer.
/// - A parameter whose tag has no ">" on its line is dropped, and so is one given twice: the first stays.
/// - A string argument streams as it comes; others are held until they are complete, then typed by the schema
///   (argument_json).
/// - A call of a function that is not declared, and what is no call, stay content, tags included. So does
/// everything
///   when no tool is declared at all.
/// - A JSON call is delivered when its object is complete; cut off before, it stays content.
/// - White space around calls is dropped, but kept between a call and text behind it when there was text
/// before.
class tool_call_parser {
 public:
  explicit tool_call_parser(tool_set tools)
      : tools_(std::move(tools)), state_(tools_.empty() ? state::no_tools : state::text) {}

  std::vector<tool_event> push(std::string_view text);
  /// The answer is over: ends an open call and releases what was held back.
  std::vector<tool_event> finish();
  /// Calls begun so far.
  std::size_t calls() const noexcept { return calls_; }

 private:
  enum class state {
    no_tools,
    text,           // outside calls
    opened,         // behind <tool_call>
    function_name,  // behind <function=
    json_object,
    refused,         // a call that stays content, up to </tool_call>
    parameters,      // between parameters
    parameter_name,  // behind <parameter=
    value,
    closing  // behind </function> or a JSON object
  };
  using events = std::vector<tool_event>;

  bool step(events& out, bool last);
  bool step_text(events& out, bool last);
  bool step_opened(events& out, bool last);
  bool step_function_name(events& out, bool last);
  bool step_json(events& out, bool last);
  bool step_refused(events& out, bool last);
  bool step_parameters(events& out, bool last);
  bool step_parameter_name(events& out, bool last);
  bool step_value(events& out, bool last);
  bool step_closing(events& out, bool last);

  std::string_view rest(std::size_t from = 0) const { return std::string_view(held_).substr(at_ + from); }
  void consume(std::size_t bytes) {
    at_ += bytes;
    scanned_ = 0;
  }
  bool refuse(events& out);
  void emit(events& out, tool_event_kind kind, std::string_view text);
  void emit_content(events& out, std::string_view text);
  void begin_call(events& out, std::string_view name);
  void end_call(events& out);
  void add_to_value(events& out, std::string_view text);
  void end_value(events& out);

  tool_set tools_;
  state state_;
  std::string held_;
  std::size_t at_ = 0;       // start of what is not consumed yet
  std::size_t scanned_ = 0;  // bytes behind at_ that were looked at already

  std::string opening_;  // text of the tags of a call that may yet be refused
  std::string space_;    // white space outside calls whose fate is open
  bool any_content_ = false, since_call_ = false;
  std::size_t calls_ = 0;

  std::string function_, parameter_, value_;
  std::set<std::string, std::less<>> given_;
  bool streams_ = false, dropped_ = false, value_started_ = false;
  int brackets_ = 0;
  bool in_string_ = false, escaped_ = false;
};

}  // namespace qwen3_moe
