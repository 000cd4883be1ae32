// SPDX-License-Identifier: Apache-2.0
// A template and its variables from anywhere. Input: the template, a byte 0, and JSON for the variables
// (optional).
#include <boost/json.hpp>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "text/chat_template.hpp"

using namespace qwen3_moe;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::size_t zero = std::min(input.find('\0'), input.size());
  boost::json::object variables{
      {"messages",
       {{{"role", "user"}, {"content", "hi <|im_end|>"}}, {{"role", "tool"}, {"content", nullptr}}}}};
  if (zero < input.size()) {
    boost::json::error_code ec;
    boost::json::value v = boost::json::parse(input.substr(zero + 1), ec);
    if (!ec && v.is_object()) variables = std::move(v.get_object());
  }
  template_options options;
  options.steps = 20'000;
  options.output_bytes = 1 << 16;
  options.string_bytes = 1 << 20;
  options.now = 1'700'000'000;
  try {
    const chat_template t(input.substr(0, zero), "fuzz", {}, options);
    const rendered_prompt p = t.render_variables(variables);
    std::size_t at = 0;
    for (const prompt_segment& s : p.segments) {
      if (s.begin != at || s.end <= s.begin) std::abort();
      at = s.end;
    }
    if (at != p.text.size() || at > options.output_bytes) std::abort();
  } catch (const template_error& e) {
    if (e.fault() == template_fault::syntax && e.line() == 0) std::abort();
  }
  return 0;
}
