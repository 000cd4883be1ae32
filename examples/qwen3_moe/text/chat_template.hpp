// SPDX-License-Identifier: Apache-2.0
/// \file
/// A checkpoint's chat template: messages in, prompt out.
#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/value.hpp>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "jinja/template_error.hpp"
#include "rendered_prompt.hpp"

namespace qwen3_moe {

/// What a template may cost. The first two are checked while loading, the rest while rendering.
struct template_options {
  std::size_t source_bytes = std::size_t{1} << 20;
  std::size_t nesting = 100;  ///< of blocks and parentheses in the template
  std::size_t output_bytes = std::size_t{64} << 20;
  std::size_t steps = 8'000'000;                      ///< expressions, statements and elements looked at
  std::size_t string_bytes = std::size_t{512} << 20;  ///< of all strings made on the way, together
  std::size_t macro_calls = 16;                       ///< deepest call of macros by macros
  std::size_t value_nesting = 100;                    ///< of messages, tools and arguments; at most 120
  std::optional<std::int64_t> now;  ///< seconds since 1970 for strftime_now(); absent: the clock
};

/// A template in the part of Jinja that chat templates use, with the settings of the transformers library:
/// trim_blocks, lstrip_blocks, tojson without escapes, raise_exception(), strftime_now(), break and continue.
/// Rendering is const and may run on several threads at once.
class chat_template {
 public:
  /// Special tokens by their name in templates: {"eos_token", "<|im_end|>"}. Their text is trusted.
  using token_names = std::map<std::string, std::string>;

  /// Throws template_error (syntax) with line and column.
  explicit chat_template(std::string_view source, std::string name = "chat template", token_names tokens = {},
                         const template_options& options = {});
  /// From chat_template.jinja in `model`, or else the field chat_template of tokenizer_config.json: a string,
  /// or a list of {name, template} of which "default" is taken. Token names come from tokenizer_config.json
  /// where it exists. Throws nibble::format_error when there is none or a file is malformed.
  static chat_template from_directory(const std::filesystem::path& model,
                                      const template_options& options = {});

  ~chat_template();
  chat_template(chat_template&&) noexcept;
  chat_template& operator=(chat_template&&) noexcept;

  /// The prompt. `tools` may be null. `arguments` are more variables for the template (enable_thinking, …);
  /// naming messages, tools, add_generation_prompt, documents, a special token or a function is an error
  /// (argument). All strings of messages, tools and arguments count as data, see rendered_prompt. Throws
  /// template_error: raised when the template refuses the request in its own words.
  rendered_prompt render(const boost::json::array& messages, const boost::json::value* tools,
                         bool add_generation_prompt, const boost::json::object& arguments = {}) const;
  /// The same template with any variables, all of them data; for tests.
  rendered_prompt render_variables(const boost::json::object& variables) const;

  const std::string& name() const noexcept;

 private:
  struct parsed;
  std::unique_ptr<parsed> parsed_;
};

}  // namespace qwen3_moe
