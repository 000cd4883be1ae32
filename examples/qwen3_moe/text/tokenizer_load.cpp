// SPDX-License-Identifier: Apache-2.0
#include <boost/json.hpp>
#include <utility>

#include "byte_level.hpp"
#include "nibble/core/error.hpp"
#include "nibble/io/file.hpp"
#include "quote.hpp"
#include "tokenizer.hpp"
#include "unicode.hpp"

namespace qwen3_moe {

namespace json = boost::json;

/// Turns the JSON of a tokenizer.json into a tokenizer. Every rule has its own sentence.
class tokenizer_loader {
 public:
  tokenizer_loader(std::string_view name, const tokenizer_limits& limits) : name_(name), limits_(limits) {}

  tokenizer load(std::string_view text) {
    if (text.size() > limits_.file_bytes)
      fail("", "has " + std::to_string(text.size()) + " bytes, more than the limit of " +
                   std::to_string(limits_.file_bytes));
    json::monotonic_resource memory;
    json::error_code ec;
    const json::value root = json::parse(text, ec, &memory);
    if (ec) fail("", "is not valid JSON: " + ec.message());
    if (!root.is_object()) fail("", "is not a JSON object");
    const json::object& o = root.get_object();
    check_absent(o, "truncation");
    check_absent(o, "padding");
    read_normalizer(o);
    read_pre_tokenizer(o);
    read_byte_level(o, "post_processor", true);
    read_byte_level(o, "decoder", false);
    const json::object& model = member(o, "", "model").as_object_or_fail();
    read_model_options(model);
    read_vocabulary(member(model, "model", "vocab").as_object_or_fail());
    read_merges(member(model, "model", "merges").as_array_or_fail());
    if (const json::value* added = o.if_contains("added_tokens"); added && !added->is_null())
      read_added_tokens(field{this, added, "added_tokens"}.as_array_or_fail());
    if (t_.ignore_merges_)
      for (const auto& [token, id] : t_.id_of_)
        if (static_cast<std::size_t>(id) < base_tokens_)
          t_.id_of_bytes_.emplace(byte_level_decode(token), id);
    return std::move(t_);
  }

 private:
  [[noreturn]] void fail(std::string_view where, const std::string& what) const {
    throw nibble::format_error(name_ + ": " + std::string(where) + (where.empty() ? "" : " ") + what);
  }

  struct field {
    const tokenizer_loader* loader;
    const json::value* value;
    std::string where;
    const json::object& as_object_or_fail() const {
      if (!value->is_object()) loader->fail(where, "must be an object");
      return value->get_object();
    }
    const json::array& as_array_or_fail() const {
      if (!value->is_array()) loader->fail(where, "must be an array");
      return value->get_array();
    }
    std::string_view as_string_or_fail() const {
      if (!value->is_string()) loader->fail(where, "must be a string");
      return value->get_string();
    }
    bool as_bool_or_fail() const {
      if (!value->is_bool()) loader->fail(where, "must be true or false");
      return value->get_bool();
    }
  };

  field member(const json::object& o, std::string_view where, std::string_view key) const {
    const json::value* v = o.if_contains(key);
    std::string path = std::string(where) + (where.empty() ? "" : ".") + std::string(key);
    if (!v) fail(path, "is missing");
    return {this, v, std::move(path)};
  }

  bool flag(const json::object& o, std::string_view where, std::string_view key, bool otherwise) const {
    return o.contains(key) && !o.at(key).is_null() ? member(o, where, key).as_bool_or_fail() : otherwise;
  }

  void check_absent(const json::object& o, std::string_view key) const {
    if (const json::value* v = o.if_contains(key); v && !v->is_null())
      fail(key, "is set; only null is supported");
  }

  std::string type_of(const json::object& o, std::string_view where) const {
    return std::string(member(o, where, "type").as_string_or_fail());
  }

  void read_normalizer(const json::object& o) {
    const json::value* v = o.if_contains("normalizer");
    if (!v || v->is_null()) return;
    const std::string type = type_of(field{this, v, "normalizer"}.as_object_or_fail(), "normalizer");
    if (type != "NFC") fail("normalizer", quote_text(type) + " is not supported; supported: \"NFC\", null");
    t_.nfc_ = true;
  }

  void read_pre_tokenizer(const json::object& o) {
    const json::object& pre = member(o, "", "pre_tokenizer").as_object_or_fail();
    if (const std::string type = type_of(pre, "pre_tokenizer"); type != "Sequence")
      fail("pre_tokenizer",
           quote_text(type) + " is not supported; supported: \"Sequence\" of \"Split\" and \"ByteLevel\"");
    const json::array& parts = member(pre, "pre_tokenizer", "pretokenizers").as_array_or_fail();
    if (parts.size() != 2)
      fail("pre_tokenizer.pretokenizers",
           "has " + std::to_string(parts.size()) + " parts; supported: \"Split\", then \"ByteLevel\"");
    const std::string first = "pre_tokenizer.pretokenizers[0]", second = "pre_tokenizer.pretokenizers[1]";
    const json::object& split = field{this, &parts[0], first}.as_object_or_fail();
    if (const std::string type = type_of(split, first); type != "Split")
      fail(first, quote_text(type) + " is not supported; supported: \"Split\"");
    const json::object& pattern = member(split, first, "pattern").as_object_or_fail();
    const std::string_view regex = member(pattern, first + ".pattern", "Regex").as_string_or_fail();
    const auto known = pattern_of(regex);
    if (!known) fail(first + ".pattern.Regex", "is none of the Qwen patterns: " + quote_text(regex));
    t_.pattern_ = *known;
    if (const auto behavior = member(split, first, "behavior").as_string_or_fail(); behavior != "Isolated")
      fail(first + ".behavior", quote_text(behavior) + " is not supported; supported: \"Isolated\"");
    if (flag(split, first, "invert", false)) fail(first + ".invert", "is true; only false is supported");
    const json::object& bytes = field{this, &parts[1], second}.as_object_or_fail();
    if (const std::string type = type_of(bytes, second); type != "ByteLevel")
      fail(second, quote_text(type) + " is not supported; supported: \"ByteLevel\"");
    if (flag(bytes, second, "add_prefix_space", true))
      fail(second + ".add_prefix_space", "is true; only false is supported");
    if (flag(bytes, second, "use_regex", true))
      fail(second + ".use_regex", "is true; only false is supported");
  }

  // A ByteLevel post-processor only moves offsets; a ByteLevel decoder has no options that change text.
  void read_byte_level(const json::object& o, std::string_view key, bool may_be_null) const {
    const json::value* v = o.if_contains(key);
    if (!v || v->is_null()) {
      if (may_be_null) return;
      fail(key, "is missing; supported: \"ByteLevel\"");
    }
    const std::string type = type_of(field{this, v, std::string(key)}.as_object_or_fail(), key);
    if (type != "ByteLevel")
      fail(key,
           quote_text(type) + " is not supported; supported: \"ByteLevel\"" + (may_be_null ? ", null" : ""));
  }

  void read_model_options(const json::object& model) {
    if (const json::value* type = model.if_contains("type"); type && *type != "BPE")
      fail("model.type", json::serialize(*type).substr(0, 60) + " is not supported; supported: \"BPE\"");
    if (const json::value* v = model.if_contains("dropout"); v && !v->is_null() && *v != 0.0)
      fail("model.dropout", "is set; only null is supported");
    if (const json::value* v = model.if_contains("unk_token"); v && !v->is_null())
      fail("model.unk_token", "is set; only null is supported");
    for (const std::string_view key : {"continuing_subword_prefix", "end_of_word_suffix"})
      if (const json::value* v = model.if_contains(key); v && !v->is_null() && *v != "")
        fail("model." + std::string(key), "is set; only null and \"\" are supported");
    for (const std::string_view key : {"fuse_unk", "byte_fallback"})
      if (flag(model, "model", key, false))
        fail("model." + std::string(key), "is true; only false is supported");
    t_.ignore_merges_ = flag(model, "model", "ignore_merges", false);
  }

  void check_token(std::string_view where, std::string_view token) const {
    if (token.empty()) fail(where, "holds an empty token");
    if (token.size() > limits_.token_bytes)
      fail(where, "holds a token of " + std::to_string(token.size()) + " bytes, more than the limit of " +
                      std::to_string(limits_.token_bytes));
  }

  // An id must lie below `end`.
  std::int32_t read_id(std::string_view where, const json::value& v, std::string_view token,
                       std::size_t end) const {
    std::uint64_t id = ~std::uint64_t{0};
    if (v.is_int64() && v.get_int64() >= 0) id = static_cast<std::uint64_t>(v.get_int64());
    if (id >= end)
      fail(where, "gives " + quote_text(token) + " the id " + json::serialize(v).substr(0, 40) +
                      "; ids here are whole numbers from 0 to " + std::to_string(end - 1));
    return static_cast<std::int32_t>(id);
  }

  void read_vocabulary(const json::object& vocab) {
    if (vocab.empty()) fail("model.vocab", "is empty");
    if (vocab.size() > limits_.tokens)
      fail("model.vocab", "has " + std::to_string(vocab.size()) + " tokens, more than the limit of " +
                              std::to_string(limits_.tokens));
    base_tokens_ = vocab.size();
    t_.tokens_.resize(base_tokens_);
    t_.id_of_.reserve(base_tokens_);
    for (const auto& [key, value] : vocab) {
      check_token("model.vocab", key);
      // As many ids as tokens, all below their number and none twice: so there are no gaps.
      const std::int32_t id = read_id("model.vocab", value, key, base_tokens_);
      tokenizer::entry& t = t_.tokens_[static_cast<std::size_t>(id)];
      if (t.known)
        fail("model.vocab",
             "gives the id " + std::to_string(id) + " to two tokens, one of them " + quote_text(key));
      t.bytes = byte_level_decode(key);
      t.known = true;
      t_.id_of_.emplace(key, id);
    }
    for (std::size_t b = 0; b < 256; ++b) {
      std::string letter;
      append_utf8(letter, byte_level_alphabet[b]);
      const auto at = t_.id_of_.find(letter);
      if (at == t_.id_of_.end())
        fail("model.vocab", "lacks the token " + quote_text(letter) + " of byte " + std::to_string(b) +
                                "; all 256 bytes need one");
      t_.byte_tokens_[b] = at->second;
    }
  }

  std::int32_t base_id(std::size_t rule, const std::string& token) const {
    const auto at = t_.id_of_.find(token);
    if (at == t_.id_of_.end())
      fail("model.merges[" + std::to_string(rule) + "]",
           "names " + quote_text(token) + ", which is not in model.vocab");
    return at->second;
  }

  void read_merges(const json::array& merges) {
    if (merges.size() > limits_.tokens * 4)
      fail("model.merges", "has " + std::to_string(merges.size()) + " entries, more than the limit of " +
                               std::to_string(limits_.tokens * 4));
    t_.merges_ = merge_table(merges.size());
    for (std::size_t i = 0; i < merges.size(); ++i) {
      std::string left, right;
      if (merges[i].is_string()) {
        const std::string_view pair = merges[i].get_string();
        const std::size_t space = pair.find(' ');
        if (space == pair.npos || pair.find(' ', space + 1) != pair.npos)
          fail("model.merges[" + std::to_string(i) + "]",
               quote_text(pair) + " is not two tokens with one space between them");
        left = pair.substr(0, space);
        right = pair.substr(space + 1);
      } else if (merges[i].is_array() && merges[i].get_array().size() == 2 &&
                 merges[i].get_array()[0].is_string() && merges[i].get_array()[1].is_string()) {
        left = merges[i].get_array()[0].get_string();
        right = merges[i].get_array()[1].get_string();
      } else {
        fail("model.merges[" + std::to_string(i) + "]", "must be a string \"a b\" or a pair of strings");
      }
      const std::int32_t a = base_id(i, left), b = base_id(i, right), joined = base_id(i, left + right);
      t_.merges_.add(a, b, {static_cast<std::uint32_t>(i), joined});
    }
  }

  void read_added_tokens(const json::array& added) {
    if (added.size() > limits_.tokens)
      fail("added_tokens", "has " + std::to_string(added.size()) + " entries, more than the limit of " +
                               std::to_string(limits_.tokens));
    for (std::size_t i = 0; i < added.size(); ++i) {
      const std::string where = "added_tokens[" + std::to_string(i) + "]";
      const json::object& o = field{this, &added[i], where}.as_object_or_fail();
      const std::string content(member(o, where, "content").as_string_or_fail());
      check_token(where, content);
      const std::int32_t id =
          read_id(where, *member(o, where, "id").value, content, limits_.tokens + base_tokens_);
      for (const std::string_view key : {"single_word", "lstrip", "rstrip"})
        if (flag(o, where, key, false))
          fail(where, "(" + quote_text(content) + ") sets " + std::string(key) + ", which is not supported");
      const bool special = flag(o, where, "special", false);
      const bool normalized = flag(o, where, "normalized", !special);
      if (normalized && special)
        fail(where, "(" + quote_text(content) + ") is both special and normalized, which is not supported");
      const auto place = static_cast<std::size_t>(id);
      if (place >= t_.tokens_.size()) t_.tokens_.resize(place + 1);
      tokenizer::entry& t = t_.tokens_[place];
      const auto same = t_.id_of_.find(content);
      if (same != t_.id_of_.end() && same->second != id)
        fail(where, "gives " + quote_text(content) + " the id " + std::to_string(id) +
                        ", but it has the id " + std::to_string(same->second) + " already");
      if (same == t_.id_of_.end() && t.known)
        fail(where,
             "gives " + quote_text(content) + " the id " + std::to_string(id) + ", which another token has");
      if (same == t_.id_of_.end()) {
        t.bytes = byte_level_decode(content);
        t.known = true;
        t_.id_of_.emplace(content, id);
      }
      t.special = t.special || special;
      if (normalized)
        t_.normalized_added_.add(t_.nfc_ ? normalize_nfc(content) : content, id, false);
      else
        t_.raw_added_.add(content, id, special);
    }
  }

  std::string name_;
  tokenizer_limits limits_;
  tokenizer t_;
  std::size_t base_tokens_ = 0;
};

tokenizer tokenizer::from_json(std::string_view json, std::string_view name, const tokenizer_limits& limits) {
  return tokenizer_loader(name, limits).load(json);
}

tokenizer tokenizer::from_file(const std::filesystem::path& path, const tokenizer_limits& limits) {
  const std::string text = nibble::io::file::read_text(path, limits.file_bytes);
  return from_json(text, path.string(), limits);
}

}  // namespace qwen3_moe
