// SPDX-License-Identifier: Apache-2.0
#include "value.hpp"

#include "../unicode.hpp"

namespace qwen3_moe::jinja {
namespace {

constexpr std::size_t indexed_from = 8;  // entries; fewer are searched one by one

bool keys_equal(const value& a, const value& b) {
  if (a.is_string() || b.is_string()) return a.is_string() && b.is_string() && a.as_view() == b.as_view();
  if (a.is_number() && b.is_number()) {
    if (!a.is_real() && !b.is_real()) return a.as_integer() == b.as_integer();
    return a.as_real() == b.as_real();
  }
  return a.is_none() && b.is_none();
}

}  // namespace

value value::undefined(std::string_view name) {
  value v;
  v.data_ = std::make_shared<const undefined_value>(undefined_value{std::string(name)});
  return v;
}

bool value::same_as(const value& other) const {
  if (data_.index() != other.data_.index()) return false;
  return std::visit(
      [&](const auto& a) {
        using held = std::decay_t<decltype(a)>;
        if constexpr (std::is_same_v<held, none_value>)
          return true;
        else
          return a == std::get<held>(other.data_);
      },
      data_);
}

void mapping::set(value key, value v) {
  depth = std::max({depth, depth_of(v) + 1, depth_of(key) + 1});
  if (const value* old = find(key)) {
    // find() hands out constant places of a vector that is ours
    const_cast<value&>(*old) = std::move(v);
    return;
  }
  entries.emplace_back(std::move(key), std::move(v));
  if (entries.size() == indexed_from) {
    for (std::size_t i = 0; i < entries.size(); ++i)
      if (entries[i].first.is_string()) strings_.emplace(entries[i].first.as_view(), i);
  } else if (entries.size() > indexed_from && entries.back().first.is_string()) {
    strings_.emplace(entries.back().first.as_view(), entries.size() - 1);
  }
}

const value* mapping::find(const value& key) const {
  if (key.is_string()) return find(key.as_view());
  for (const auto& e : entries)
    if (keys_equal(e.first, key)) return &e.second;
  return nullptr;
}

const value* mapping::find(std::string_view key) const {
  if (entries.size() >= indexed_from) {
    const auto at = strings_.find(std::string(key));
    return at == strings_.end() ? nullptr : &entries[at->second].second;
  }
  for (const auto& e : entries)
    if (e.first.is_string() && e.first.as_view() == key) return &e.second;
  return nullptr;
}

std::uint32_t depth_of(const value& v) {
  if (v.is_sequence()) return v.as_sequence().depth;
  if (v.is_mapping()) return v.as_mapping().depth;
  return 0;
}

std::string type_name(const value& v) {
  if (v.is_undefined()) return "Undefined";
  if (v.is_none()) return "NoneType";
  if (v.is_bool()) return "bool";
  if (v.is_integer()) return "int";
  if (v.is_real()) return "float";
  if (v.is_string()) return "str";
  if (v.is_mapping()) return "dict";
  if (v.is_namespace()) return "Namespace";
  if (v.is_loop()) return "LoopContext";
  if (v.is_callable()) return "function";
  switch (v.as_sequence().kind) {
    case sequence_kind::list:
      return "list";
    case sequence_kind::tuple:
      return "tuple";
    case sequence_kind::generator:
      break;
  }
  return "generator";
}

bool truth(const value& v) {
  if (v.is_undefined() || v.is_none()) return false;
  if (v.is_real()) return v.as_real() != 0;
  if (v.is_number()) return v.as_integer() != 0;
  if (v.is_string()) return !v.as_text().empty();
  if (v.is_sequence())
    return v.as_sequence().kind == sequence_kind::generator || !v.as_sequence().items.empty();
  if (v.is_mapping()) return !v.as_mapping().entries.empty();
  return true;
}

std::size_t count_characters(std::string_view s) {
  std::size_t n = 0;
  for (std::size_t at = 0; at < s.size(); at += decode_utf8(s, at).bytes) ++n;
  return n;
}

}  // namespace qwen3_moe::jinja
