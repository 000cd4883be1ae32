// SPDX-License-Identifier: Apache-2.0
/// \file
/// A string that knows which of its bytes came from the template.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace qwen3_moe::jinja {

/// Bytes with a trust bit each, stored as the places where it flips. Trusted bytes are the template's own
/// literals.
class text {
 public:
  text() = default;
  text(std::string bytes, bool trusted) : bytes_(std::move(bytes)), first_trusted_(trusted) {}

  const std::string& bytes() const noexcept { return bytes_; }
  std::string_view view() const noexcept { return bytes_; }
  std::size_t size() const noexcept { return bytes_.size(); }
  bool empty() const noexcept { return bytes_.empty(); }
  bool all_trusted() const noexcept { return flips_.empty() && (first_trusted_ || empty()); }

  void append(std::string_view bytes, bool trusted) {
    if (bytes.empty()) return;
    join(trusted);
    bytes_ += bytes;
  }

  void append(const text& other) {
    if (other.empty()) return;
    join(other.first_trusted_);
    for (const std::size_t f : other.flips_) flips_.push_back(bytes_.size() + f);
    bytes_ += other.bytes_;
  }

  /// Appends bytes [begin, end) of `other`, with their trust.
  void append(const text& other, std::size_t begin, std::size_t end) {
    if (begin >= end) return;
    auto f = std::upper_bound(other.flips_.begin(), other.flips_.end(), begin);
    join(other.first_trusted_ != ((f - other.flips_.begin()) % 2 != 0));
    for (; f != other.flips_.end() && *f < end; ++f) flips_.push_back(bytes_.size() + (*f - begin));
    bytes_.append(other.bytes_, begin, end - begin);
  }

  text slice(std::size_t begin, std::size_t end) const {
    text out;
    out.append(*this, begin, end);
    return out;
  }

  /// Calls visit(begin, end, trusted) for each run of one trust, in order.
  template <class Visit>
  void for_each_run(Visit visit) const {
    std::size_t begin = 0;
    bool trusted = first_trusted_;
    for (const std::size_t f : flips_) {
      visit(begin, f, trusted);
      begin = f;
      trusted = !trusted;
    }
    if (begin < size()) visit(begin, size(), trusted);
  }

 private:
  // Makes the next byte appended carry `trusted`.
  void join(bool trusted) {
    if (empty())
      first_trusted_ = trusted;
    else if ((first_trusted_ != (flips_.size() % 2 != 0)) != trusted)
      flips_.push_back(size());
  }

  std::string bytes_;
  std::vector<std::size_t> flips_;
  bool first_trusted_ = false;
};

}  // namespace qwen3_moe::jinja
