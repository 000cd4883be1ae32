// SPDX-License-Identifier: Apache-2.0
/// \file
/// The values a template computes with: Python's, as far as templates can tell.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "text.hpp"

namespace qwen3_moe::jinja {

/// Wide enough that every int64 and uint64 keeps its digits and one sum or product cannot overflow.
__extension__ using wide_int = __int128;

class value;
struct sequence;
struct mapping;
struct name_space;
struct callable;
struct loop_state;

/// A name or attribute that does not exist.
struct undefined_value {
  std::string name;
};
struct none_value {};

/// Immutable but for namespaces; copying shares.
class value {
 public:
  using storage = std::variant<std::shared_ptr<const undefined_value>, none_value, bool, wide_int, double,
                               std::shared_ptr<const text>, std::shared_ptr<const sequence>,
                               std::shared_ptr<const mapping>, std::shared_ptr<name_space>,
                               std::shared_ptr<const callable>, std::shared_ptr<loop_state>>;

  value() : data_(none_value{}) {}
  explicit value(bool b) : data_(b) {}
  explicit value(wide_int i) : data_(i) {}
  explicit value(double d) : data_(d) {}
  explicit value(text t) : data_(std::make_shared<const text>(std::move(t))) {}
  explicit value(std::shared_ptr<const sequence> s) : data_(std::move(s)) {}
  explicit value(std::shared_ptr<const mapping> m) : data_(std::move(m)) {}
  explicit value(std::shared_ptr<name_space> n) : data_(std::move(n)) {}
  explicit value(std::shared_ptr<const callable> c) : data_(std::move(c)) {}
  explicit value(std::shared_ptr<loop_state> l) : data_(std::move(l)) {}
  static value undefined(std::string_view name);
  static value integer(std::size_t i) { return value(static_cast<wide_int>(i)); }
  static value string(std::string s, bool trusted) { return value(text(std::move(s), trusted)); }

  bool is_undefined() const { return holds<std::shared_ptr<const undefined_value>>(); }
  bool is_none() const { return holds<none_value>(); }
  bool is_bool() const { return holds<bool>(); }
  bool is_integer() const { return holds<wide_int>(); }
  bool is_real() const { return holds<double>(); }
  bool is_number() const { return is_bool() || is_integer() || is_real(); }
  bool is_string() const { return holds<std::shared_ptr<const text>>(); }
  bool is_sequence() const { return holds<std::shared_ptr<const sequence>>(); }
  bool is_mapping() const { return holds<std::shared_ptr<const mapping>>(); }
  bool is_namespace() const { return holds<std::shared_ptr<name_space>>(); }
  bool is_callable() const { return holds<std::shared_ptr<const callable>>(); }
  bool is_loop() const { return holds<std::shared_ptr<loop_state>>(); }

  const std::string& undefined_name() const { return get<std::shared_ptr<const undefined_value>>()->name; }
  bool as_bool() const { return get<bool>(); }
  wide_int as_integer() const {
    return is_bool() ? wide_int{as_bool()} : get<wide_int>();
  }  ///< of a bool, too
  double as_real() const {
    return is_real() ? get<double>() : static_cast<double>(as_integer());
  }  ///< of any number
  const text& as_text() const { return *get<std::shared_ptr<const text>>(); }
  std::string_view as_view() const { return as_text().view(); }
  const sequence& as_sequence() const { return *get<std::shared_ptr<const sequence>>(); }
  const mapping& as_mapping() const { return *get<std::shared_ptr<const mapping>>(); }
  name_space& as_namespace() const { return *get<std::shared_ptr<name_space>>(); }
  const callable& as_callable() const { return *get<std::shared_ptr<const callable>>(); }
  loop_state& as_loop() const { return *get<std::shared_ptr<loop_state>>(); }
  /// True when both are one object (Python's `is`).
  bool same_as(const value& other) const;

 private:
  template <class T>
  bool holds() const {
    return std::holds_alternative<T>(data_);
  }
  template <class T>
  const T& get() const {
    return std::get<T>(data_);
  }
  storage data_;
};

enum class sequence_kind { list, tuple, generator };

/// `depth` is 1 + the deepest element's, so that walks over values can recurse.
struct sequence {
  std::vector<value> items;
  sequence_kind kind = sequence_kind::list;
  std::uint32_t depth = 1;
};

/// Keys in order of insertion. Setting a key again keeps its place.
struct mapping {
  std::vector<std::pair<value, value>> entries;
  std::uint32_t depth = 1;

  void set(value key, value v);
  const value* find(const value& key) const;
  const value* find(std::string_view key) const;

 private:
  std::unordered_map<std::string, std::size_t> strings_;
};

struct name_space {
  std::vector<std::pair<std::string, value>> attributes;
};

/// What `loop` stands for inside a for block.
struct loop_state {
  std::shared_ptr<const sequence> items;
  std::size_t index = 0;  ///< from 0
  std::size_t depth = 0;  ///< enclosing loops
  std::vector<value> last_changed;
  bool changed_called = false;
};

std::uint32_t depth_of(const value& v);

/// A template's own deepest container; deeper is refused, so recursion over values is bounded.
inline constexpr std::uint32_t deepest_value = 128;

/// Python's name of the type, for messages.
std::string type_name(const value& v);

bool truth(const value& v);

/// UTF-8 characters of a string.
std::size_t count_characters(std::string_view s);

}  // namespace qwen3_moe::jinja
