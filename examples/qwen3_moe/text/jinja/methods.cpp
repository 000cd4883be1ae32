// SPDX-License-Identifier: Apache-2.0
// Methods of strings, dicts and lists.
#include <algorithm>
#include <limits>

#include "../quote.hpp"
#include "../unicode.hpp"
#include "interpreter.hpp"

namespace qwen3_moe::jinja {
namespace {

constexpr std::int64_t unlimited = -1;

class string_method {
 public:
  string_method(interpreter& run, position at, const callable& m, const call_values& arguments)
      : run_(run), at_(at), name_(m.name), self_(m.self.as_text()), args_(arguments) {}

  value operator()() {
    run_.step(at_, self_.size() / 16 + 1);
    if (name_ == "strip" || name_ == "lstrip" || name_ == "rstrip") return strip();
    if (name_ == "split" || name_ == "rsplit") return split(name_ == "rsplit");
    if (name_ == "startswith" || name_ == "endswith") return affix();
    if (name_ == "replace") return replace();
    if (name_ == "find" || name_ == "rfind" || name_ == "index") return find();
    if (name_ == "join") return join();
    if (name_ == "count") return count();
    if (name_ == "splitlines") return split_lines();
    if (name_ == "removeprefix" || name_ == "removesuffix") return remove_affix();
    bind(run_, at_, name_, args_, {});
    if (name_ == "upper") return changed(upper(self_.view()));
    if (name_ == "lower") return changed(lower(self_.view()));
    if (name_ == "title") return changed(title(self_.view(), true));
    if (name_ == "capitalize") return changed(capitalized(self_.view()));
    return value(is_all());
  }

 private:
  value changed(std::string s) { return run_.make_string(at_, std::move(s), self_.all_trusted()); }
  value part(std::size_t begin, std::size_t end) { return run_.make_string(at_, self_.slice(begin, end)); }

  const text& text_argument(const std::optional<value>& v) const {
    if (!v || !v->is_string())
      run_.fail(at_, name_ + "() needs a string" + (v ? ", not " + type_name(*v) : ""));
    return v->as_text();
  }

  std::int64_t count_argument(const std::optional<value>& v) const {
    if (!v) return unlimited;
    const wide_int n = run_.to_integer(at_, *v, name_ + "()'s count");
    return n < 0 ? unlimited
                 : static_cast<std::int64_t>(std::min<wide_int>(n, std::numeric_limits<std::int64_t>::max()));
  }

  value strip() {
    const auto a = bind(run_, at_, name_, args_, {"chars"});
    std::optional<std::string_view> chars;
    if (a[0] && !a[0]->is_none()) chars = text_argument(a[0]).view();
    if (chars) run_.step(at_, chars->size() * (self_.size() / 16 + 1));
    const auto [begin, end] = stripped_range(self_.view(), chars,
                                             name_ == "strip"    ? 3
                                             : name_ == "lstrip" ? 1
                                                                 : 2);
    return part(begin, end);
  }

  value split(bool from_right) {
    const auto a = bind(run_, at_, name_, args_, {"sep", "maxsplit"});
    std::int64_t left = count_argument(a[1]);
    const std::string_view s = self_.view();
    std::vector<std::pair<std::size_t, std::size_t>> parts;
    if (!a[0] || a[0]->is_none()) {
      split_at_space(left, from_right, parts);
    } else {
      const std::string_view separator = text_argument(a[0]).view();
      if (separator.empty()) run_.fail(at_, name_ + "() with an empty separator");
      std::size_t begin = 0, end = s.size();
      for (; left != 0; --left) {
        run_.step(at_);
        if (from_right) {
          const std::size_t hit =
              end < separator.size() ? s.npos : s.rfind(separator, end - separator.size());
          if (hit == s.npos) break;
          parts.emplace_back(hit + separator.size(), end);
          end = hit;
        } else {
          const std::size_t hit = s.find(separator, begin);
          if (hit == s.npos) break;
          parts.emplace_back(begin, hit);
          begin = hit + separator.size();
        }
      }
      parts.emplace_back(begin, end);
    }
    if (from_right) std::reverse(parts.begin(), parts.end());
    std::vector<value> out;
    for (const auto& [begin, end] : parts) out.push_back(part(begin, end));
    return run_.make_sequence(at_, std::move(out));
  }

  // Runs of white space separate; of what is left when `left` cuts are made, only the near end is stripped.
  void split_at_space(std::int64_t left, bool from_right,
                      std::vector<std::pair<std::size_t, std::size_t>>& parts) {
    const std::string_view s = self_.view();
    std::size_t begin = 0, end = s.size();
    const auto strip_near = [&] {
      const auto range = stripped_range(s.substr(begin, end - begin), std::nullopt, from_right ? 2 : 1);
      if (from_right)
        end = begin + range.second;
      else
        begin += range.first;
    };
    for (strip_near(); begin < end; strip_near()) {
      run_.step(at_);
      std::size_t cut = from_right ? end : begin;  // walks over the word
      while (left != 0 && (from_right ? cut > begin : cut < end)) {
        std::size_t next = from_right ? cut - 1 : cut;
        while (from_right && next > begin && (static_cast<unsigned char>(s[next]) & 0xC0) == 0x80) --next;
        const decoded_character c = decode_utf8(s, next);
        if (is_python_space(c.value)) break;
        cut = from_right ? next : next + c.bytes;
      }
      if (left == 0) cut = from_right ? begin : end;
      if (left > 0) --left;
      if (from_right) {
        parts.emplace_back(cut, end);
        end = cut;
      } else {
        parts.emplace_back(begin, cut);
        begin = cut;
      }
    }
  }

  value affix() {
    const auto a = bind(run_, at_, name_, args_, {"prefix"});
    const auto matches = [&](const std::optional<value>& v) {
      const std::string_view x = text_argument(v).view();
      return name_ == "startswith" ? self_.view().starts_with(x) : self_.view().ends_with(x);
    };
    if (a[0] && a[0]->is_sequence() && a[0]->as_sequence().kind == sequence_kind::tuple) {
      for (const value& v : a[0]->as_sequence().items)
        if (matches(v)) return value(true);
      return value(false);
    }
    return value(matches(a[0]));
  }

  value replace() {
    const auto a = bind(run_, at_, name_, args_, {"old", "new", "count"});
    return value(replaced(run_, at_, self_, text_argument(a[0]), text_argument(a[1]), count_argument(a[2])));
  }

  value find() {
    const auto a = bind(run_, at_, name_, args_, {"sub"});
    const std::string_view what = text_argument(a[0]).view();
    const std::size_t hit = name_ == "rfind" ? self_.view().rfind(what) : self_.view().find(what);
    if (hit != std::string_view::npos) return value::integer(count_characters(self_.view().substr(0, hit)));
    if (name_ == "index") run_.fail(at_, "index(): the text is not there");
    return value(wide_int{-1});
  }

  value join() {
    const auto a = bind(run_, at_, name_, args_, {"iterable"});
    if (!a[0]) run_.fail(at_, "join() needs an argument");
    text out;
    bool first = true;
    for (const value& v : run_.elements(at_, *a[0])) {
      if (!first) out.append(self_);
      first = false;
      out.append(text_argument(v));
      run_.charge_string(at_, self_.size() + v.as_text().size());
    }
    return value(std::move(out));
  }

  value count() {
    const auto a = bind(run_, at_, name_, args_, {"sub"});
    const std::string_view what = text_argument(a[0]).view(), s = self_.view();
    if (what.empty()) return value::integer(count_characters(s) + 1);
    std::size_t n = 0;
    for (std::size_t at = s.find(what); at != s.npos; at = s.find(what, at + what.size())) ++n;
    return value::integer(n);
  }

  value split_lines() {
    const auto a = bind(run_, at_, name_, args_, {"keepends"});
    const bool keep = a[0] && truth(*a[0]);
    const std::string_view s = self_.view();
    std::vector<value> out;
    std::size_t begin = 0;
    for (std::size_t i = 0; i < s.size();) {
      const decoded_character d = decode_utf8(s, i);
      const char32_t c = d.value;
      std::size_t after = i + d.bytes;
      if ((c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029) {
        if (c == '\r' && after < s.size() && s[after] == '\n') ++after;
        out.push_back(part(begin, keep ? after : i));
        begin = after;
      }
      i = after;
    }
    if (begin < s.size()) out.push_back(part(begin, s.size()));
    return run_.make_sequence(at_, std::move(out));
  }

  value remove_affix() {
    const auto a = bind(run_, at_, name_, args_, {"affix"});
    const std::string_view x = text_argument(a[0]).view(), s = self_.view();
    if (name_ == "removeprefix") return part(s.starts_with(x) ? x.size() : 0, s.size());
    return part(0, s.ends_with(x) ? s.size() - x.size() : s.size());
  }

  // isalpha, isdigit, isspace, islower, isupper. ASCII digits count as digits, others do not.
  bool is_all() const {
    const std::string_view s = self_.view();
    if (name_ == "islower" || name_ == "isupper")
      return (name_ == "islower" ? lower(s) : upper(s)) == s && lower(s) != upper(s);
    for (std::size_t i = 0; i < s.size(); i += decode_utf8(s, i).bytes) {
      const char32_t c = decode_utf8(s, i).value;
      if (!(name_ == "isalpha"   ? is_letter(c)
            : name_ == "isdigit" ? c >= '0' && c <= '9'
                                 : is_python_space(c)))
        return false;
    }
    return !s.empty();
  }

  interpreter& run_;
  position at_;
  const std::string& name_;
  const text& self_;
  const call_values& args_;
};

value dict_method(interpreter& run, position at, const callable& m, const call_values& arguments) {
  const mapping& self = m.self.as_mapping();
  if (m.name == "get") {
    const auto a = bind(run, at, m.name, arguments, {"key", "default"});
    if (!a[0]) run.fail(at, "get() needs a key");
    const value* v = self.find(*a[0]);
    return v ? *v : a[1] ? *a[1] : value();
  }
  bind(run, at, m.name, arguments, {});
  if (m.name == "copy") return m.self;
  std::vector<value> out;
  for (const auto& [key, v] : self.entries) {
    if (m.name == "keys") out.push_back(key);
    if (m.name == "values") out.push_back(v);
    if (m.name == "items") out.push_back(run.make_sequence(at, {key, v}, sequence_kind::tuple));
  }
  if (m.name != "keys" && m.name != "values" && m.name != "items")
    run.fail(at, "the dict method " + quote_text(m.name) + " is not supported: values cannot be changed");
  return run.make_sequence(at, std::move(out));
}

value list_method(interpreter& run, position at, const callable& m, const call_values& arguments) {
  const auto a = bind(run, at, m.name, arguments, {"value"});
  if (!a[0]) run.fail(at, m.name + "() needs an argument");
  std::size_t n = 0;
  const auto& items = m.self.as_sequence().items;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (!run.equal(at, items[i], *a[0])) continue;
    if (m.name == "index") return value::integer(i);
    ++n;
  }
  if (m.name == "index") run.fail(at, "index(): the value is not there");
  return value::integer(n);
}

}  // namespace

value interpreter::call_method(position at, const callable& m, const call_values& arguments) {
  if (m.self.is_string()) return string_method(*this, at, m, arguments)();
  if (m.self.is_mapping()) return dict_method(*this, at, m, arguments);
  return list_method(*this, at, m, arguments);
}

}  // namespace qwen3_moe::jinja
