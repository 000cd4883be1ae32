// SPDX-License-Identifier: Apache-2.0
#include "text_model.hpp"

#include <filesystem>
#include <system_error>
#include <utility>

#include "api_error.hpp"
#include "nibble/core/error.hpp"
#include "text/reasoning_parser.hpp"

namespace qwen3_moe {

text_model text_model::load(const std::filesystem::path& folder) {
  std::error_code unreadable;
  if (!std::filesystem::is_directory(folder, unreadable))
    throw nibble::format_error(folder.string() + ": not a folder" +
                               (unreadable ? ": " + unreadable.message() : "") +
                               "; give the folder of a Hugging Face checkpoint");
  auto tokens = tokenizer::from_file(folder / "tokenizer.json");
  try {
    text_model model(std::move(tokens), chat_template::from_directory(folder));
    model.check_template();
    return model;
  } catch (const template_error& problem) {
    throw nibble::format_error(problem.what());  // a file that breaks a rule, like any other
  }
}

// Much of what is wrong with a template shows only when it runs; better now than in every answer.
void text_model::check_template() const {
  const json::array greeting{json::object{{"role", "user"}, {"content", "Hello"}}};
  const auto fail = [&](const std::string& why) {
    throw nibble::format_error("the chat template cannot render one message of a user: " + why);
  };
  try {
    const auto rendered = form_.render(greeting, nullptr, true);
    if (tokens_.encode(rendered).empty()) fail(form_.name() + " makes an empty prompt of it");
  } catch (const template_error& problem) {
    fail(problem.what());
  }
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
  prompt.in_reasoning = ends_inside_reasoning(rendered.text);
  return prompt;
}

}  // namespace qwen3_moe
