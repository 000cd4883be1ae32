// SPDX-License-Identifier: Apache-2.0
#include "text_model.hpp"

#include "api_error.hpp"

namespace qwen3_moe {

text_model text_model::load(const std::filesystem::path& folder) {
  return {tokenizer::from_file(folder / "tokenizer.json"), chat_template::from_directory(folder)};
}

chat_prompt text_model::prompt_of(const chat_request& request) const {
  const json::value tools = request.tools.empty() ? json::value(nullptr) : json::value(request.tools);
  rendered_prompt rendered;
  try {
    rendered =
        form_.render(request.messages, tools.is_null() ? nullptr : &tools, true, request.template_arguments);
  } catch (const template_error& problem) {
    if (problem.fault() == template_fault::syntax) throw;
    const bool argument = problem.fault() == template_fault::argument;
    throw api_error(400, std::string("the chat template refuses this request: ") + problem.what(),
                    "invalid_request_error", argument ? "chat_template_kwargs" : "messages");
  }
  chat_prompt prompt;
  prompt.ids = tokens_.encode(rendered);
  // The generation prompt is the last thing the template writes; nothing of the request comes after it.
  const auto end = rendered.text.find_last_not_of(" \t\r\n");
  constexpr std::string_view open = "<think>";
  prompt.in_reasoning = end != std::string::npos && end + 1 >= open.size() &&
                        std::string_view(rendered.text).substr(end + 1 - open.size(), open.size()) == open;
  return prompt;
}

}  // namespace qwen3_moe
