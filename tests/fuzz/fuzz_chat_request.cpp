// SPDX-License-Identifier: Apache-2.0
// Bytes to JSON to a checked request to a rendered prompt. Whatever comes in, the only way out besides
// success is an api_error with a body that is itself valid JSON, or a template_error.
#include <boost/json/parse.hpp>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "server/api_error.hpp"
#include "server/chat_request.hpp"
#include "server/json.hpp"
#include "text/chat_template.hpp"

namespace {

using namespace qwen3_moe;

constexpr std::int32_t vocab_size = 2048;

constexpr std::string_view template_source = R"({%- for tool in tools or [] %}{{ tool | tojson }}
{%- endfor %}
{%- for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content | trim }}
{%- if message.reasoning_content is string %}{{ message.reasoning_content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{ call.function.name }}{%- for name, value in call.function.arguments | items %}{{ name }}={{ value if value is string else (value | tojson) }}
{%- endfor %}
{%- endfor %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{%- endif %}{%- endif %})";

void check(bool fine) {
  if (!fine) std::abort();
}

template <class Parse>
void attempt(const Parse& parse) {
  try {
    parse();
  } catch (const api_error& problem) {
    check(problem.status >= 400 && problem.status < 500);
    const auto body = boost::json::parse(problem.body());
    check(body.at("error").at("message").is_string());
  } catch (const template_error& problem) {
    check(problem.fault() != template_fault::syntax);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const chat_template form(template_source, "fuzz");
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  attempt([&] {
    const auto body = parse_json(text, "the request body");
    attempt([&] {
      const auto request = parse_chat_request(body, vocab_size);
      for (const auto& message : request.messages) check(message.at("content").is_string());
      check(request.stop.size() <= request_limits::stop_strings);
      const json::value tools = request.tools.empty() ? json::value(nullptr) : json::value(request.tools);
      const auto prompt =
          form.render(request.messages, tools.is_null() ? nullptr : &tools, true, request.template_arguments);
      check(!prompt.text.empty());
      check(!prompt.segments.empty() && prompt.segments.back().end == prompt.text.size());
      check(sampling_refusal(sampling_of(request, {}, 1, 0), vocab_size).empty());
    });
    attempt([&] { parse_completion_request(body, vocab_size); });
  });
  return 0;
}
