// SPDX-License-Identifier: Apache-2.0
#include "chat_template.hpp"

#include <algorithm>
#include <boost/json.hpp>

#include "jinja/interpreter.hpp"
#include "jinja/parser.hpp"
#include "nibble/io/file.hpp"
#include "quote.hpp"

namespace qwen3_moe {

namespace json = boost::json;

namespace {

constexpr std::string_view reserved_names[] = {
    "messages",  "tools", "documents", "add_generation_prompt", "raise_exception",
    "namespace", "range", "dict",      "strftime_now",          "loop"};

// Recursion is as deep as `left` allows.
jinja::value convert(const json::value& v, std::size_t left) {
  if (left == 0)
    throw template_error(template_fault::limit, "messages, tools or template arguments nest too deeply");
  switch (v.kind()) {
    case json::kind::null:
      return {};
    case json::kind::bool_:
      return jinja::value(v.get_bool());
    case json::kind::int64:
      return jinja::value(static_cast<jinja::wide_int>(v.get_int64()));
    case json::kind::uint64:
      return jinja::value(static_cast<jinja::wide_int>(v.get_uint64()));
    case json::kind::double_:
      return jinja::value(v.get_double());
    case json::kind::string:
      return jinja::value::string(std::string(v.get_string()), false);
    case json::kind::array: {
      auto s = std::make_shared<jinja::sequence>();
      s->items.reserve(v.get_array().size());
      for (const json::value& x : v.get_array()) {
        s->items.push_back(convert(x, left - 1));
        s->depth = std::max(s->depth, jinja::depth_of(s->items.back()) + 1);
      }
      return jinja::value(std::shared_ptr<const jinja::sequence>(std::move(s)));
    }
    case json::kind::object:
      break;
  }
  auto m = std::make_shared<jinja::mapping>();
  for (const auto& [key, x] : v.get_object())
    m->set(jinja::value::string(std::string(key), false), convert(x, left - 1));
  return jinja::value(std::shared_ptr<const jinja::mapping>(std::move(m)));
}

// A token in tokenizer_config.json: a string, or an object with its content.
std::optional<std::string> token_text(const json::value& v) {
  if (v.is_string()) return std::string(v.get_string());
  if (!v.is_object()) return std::nullopt;
  const json::value* content = v.get_object().if_contains("content");
  return content && content->is_string() ? std::optional<std::string>(content->get_string()) : std::nullopt;
}

std::string template_field(const std::string& file, const json::object& config) {
  const json::value* field = config.if_contains("chat_template");
  if (!field || field->is_null())
    throw nibble::format_error(file +
                               ": has no chat_template, and there is no chat_template.jinja beside it");
  if (field->is_string()) return std::string(field->get_string());
  if (field->is_array()) {
    for (const json::value& v : field->get_array()) {
      if (!v.is_object()) continue;
      const json::value* name = v.get_object().if_contains("name");
      const json::value* source = v.get_object().if_contains("template");
      if (name && *name == "default" && source && source->is_string())
        return std::string(source->get_string());
    }
    throw nibble::format_error(file + ": chat_template lists no template named \"default\"");
  }
  throw nibble::format_error(file + ": chat_template must be a string or a list of {name, template}");
}

rendered_prompt to_prompt(jinja::text t) {
  rendered_prompt out;
  t.for_each_run([&](std::size_t begin, std::size_t end, bool trusted) {
    out.segments.push_back({begin, end, trusted});
  });
  out.text = t.bytes();
  return out;
}

}  // namespace

struct chat_template::parsed {
  parsed(std::string_view text, std::string n, token_names t, const template_options& o)
      : name(n),
        source(text, std::move(n), o.source_bytes),
        tree(jinja::parse(source, o.nesting)),
        tokens(std::move(t)),
        options(o) {
    options.value_nesting = std::min<std::size_t>(options.value_nesting, 120);
  }

  jinja::interpreter interpreter() const {
    return {source,
            tree,
            {options.output_bytes, options.steps, options.string_bytes, options.macro_calls},
            options.now};
  }

  std::string name;
  jinja::template_source source;
  jinja::syntax_tree tree;
  token_names tokens;
  template_options options;
};

chat_template::chat_template(std::string_view source, std::string name, token_names tokens,
                             const template_options& options)
    : parsed_(std::make_unique<parsed>(source, std::move(name), std::move(tokens), options)) {}
chat_template::~chat_template() = default;
chat_template::chat_template(chat_template&&) noexcept = default;
chat_template& chat_template::operator=(chat_template&&) noexcept = default;

const std::string& chat_template::name() const noexcept { return parsed_->name; }

chat_template chat_template::from_directory(const std::filesystem::path& model,
                                            const template_options& options) {
  const std::filesystem::path jinja_path = model / "chat_template.jinja",
                              config_path = model / "tokenizer_config.json";
  std::optional<std::string> source = nibble::io::file::read_optional_text(jinja_path, options.source_bytes);
  const std::optional<std::string> text =
      nibble::io::file::read_optional_text(config_path, std::size_t{16} << 20);
  if (!source && !text)
    throw nibble::format_error(model.string() +
                               ": has neither chat_template.jinja nor tokenizer_config.json");
  token_names tokens;
  json::value config;
  if (text) {
    json::error_code ec;
    config = json::parse(*text, ec);
    if (ec) throw nibble::format_error(config_path.string() + ": is not valid JSON: " + ec.message());
    if (!config.is_object()) throw nibble::format_error(config_path.string() + ": is not a JSON object");
    for (const auto& [key, v] : config.get_object()) {
      const std::string_view k = key;
      if (k.ends_with("_token") && !k.starts_with("add_"))
        if (auto token = token_text(v)) tokens.emplace(k, std::move(*token));
    }
  }
  std::string name = jinja_path.string();
  if (!source) {
    source = template_field(config_path.string(), config.get_object());
    name = config_path.string() + " (chat_template)";
  }
  return chat_template(*source, std::move(name), std::move(tokens), options);
}

rendered_prompt chat_template::render(const json::array& messages, const json::value* tools,
                                      bool add_generation_prompt, const json::object& arguments) const {
  jinja::interpreter run = parsed_->interpreter();
  for (const auto& [key, v] : arguments) {
    const std::string name(key);
    if (std::find(std::begin(reserved_names), std::end(reserved_names), name) != std::end(reserved_names) ||
        parsed_->tokens.contains(name))
      throw template_error(template_fault::argument, "the template argument " + quote_text(name) +
                                                         " is set by the server and cannot be given");
    run.set_global(name, convert(v, parsed_->options.value_nesting));
  }
  auto list = std::make_shared<jinja::sequence>();
  for (const json::value& m : messages) {
    list->items.push_back(convert(m, parsed_->options.value_nesting));
    list->depth = std::max(list->depth, jinja::depth_of(list->items.back()) + 1);
  }
  run.set_global("messages", jinja::value(std::shared_ptr<const jinja::sequence>(std::move(list))));
  run.set_global("tools", tools ? convert(*tools, parsed_->options.value_nesting) : jinja::value());
  run.set_global("documents", jinja::value());
  run.set_global("add_generation_prompt", jinja::value(add_generation_prompt));
  for (const auto& [name, token] : parsed_->tokens) run.set_global(name, jinja::value::string(token, true));
  return to_prompt(run.run());
}

rendered_prompt chat_template::render_variables(const json::object& variables) const {
  jinja::interpreter run = parsed_->interpreter();
  for (const auto& [key, v] : variables) run.set_global(key, convert(v, parsed_->options.value_nesting));
  return to_prompt(run.run());
}

}  // namespace qwen3_moe
