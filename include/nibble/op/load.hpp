// SPDX-License-Identifier: Apache-2.0
/// \file
/// Loading an op tree in two phases: bind everything, then copy.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "nibble/core/bf16.hpp"
#include "nibble/op/bind.hpp"

namespace nibble {

namespace detail {

/// Refuses NaN (0x7F, 0xFF) and, for block scales, a set sign bit other than -0: a scale is a magnitude.
inline void check_e4m3(const io::tensor_slice& slice, std::span<const std::byte> bytes, std::uint64_t first,
                       bool is_scale) {
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const auto value = static_cast<unsigned>(bytes[i]);
    if ((value & 0x7Fu) != 0x7Fu && !(is_scale && value > 0x80u)) continue;
    throw format_error(slice.source->path().string() + ": " + slice.name + " has " +
                       ((value & 0x7Fu) == 0x7Fu ? "NaN" : "a negative scale") + " (byte " +
                       std::to_string(value) + ") at index " + std::to_string(first + i) +
                       "; the checkpoint is damaged, download it again");
  }
}

/// Refuses NaN and infinity in bf16 or fp32 values of a tensor. One of them anywhere reaches every logit.
inline void check_finite(const io::tensor_slice& slice, std::span<const std::byte> bytes,
                         std::uint64_t first_byte) {
  // The upper half of an fp32 value is a bf16 value: sign, all of the exponent, and part of the fraction.
  const std::size_t size = slice.type() == io::dtype::f32 ? 4 : 2;
  if (slice.type() != io::dtype::f32 && slice.type() != io::dtype::bf16) return;
  for (std::size_t i = 0; i + size <= bytes.size(); i += size) {
    std::uint16_t upper = 0;
    std::memcpy(&upper, bytes.data() + i + size - 2, 2);
    if ((upper & 0x7F80u) != 0x7F80u) continue;
    throw format_error(slice.source->path().string() + ": " + slice.name +
                       " has a value that is not finite at index " + std::to_string((first_byte + i) / size) +
                       "; the checkpoint is damaged, download it again");
  }
}

/// Does one transfer in pieces that fit a core's cache.
inline void run_copy(const weight_copy& copy) {
  using conversion = weight_copy::conversion;
  constexpr std::uint64_t piece_bytes = 1 << 20;
  std::vector<std::byte> scratch;
  for (std::uint64_t done = 0; done < copy.from.bytes;) {
    const std::uint64_t count = std::min(piece_bytes, copy.from.bytes - done);
    if (copy.how == conversion::to_fp32 && copy.from.type() == io::dtype::bf16) {
      scratch.resize(count);
      copy.from.read(done, scratch);
      check_finite(copy.from, scratch, done);
      auto* out = reinterpret_cast<float*>(copy.to) + done / 2;
      for (std::uint64_t i = 0; i < count / 2; ++i) {
        std::uint16_t bits = 0;
        std::memcpy(&bits, scratch.data() + 2 * i, 2);
        out[i] = bf16::decode(bits);
      }
    } else {
      std::span<const std::byte> bytes;
      if (copy.to == nullptr) {
        bytes = copy.from.map().subspan(done, count);
      } else {
        const std::span<std::byte> out(copy.to + done, count);
        copy.from.read(done, out);
        bytes = out;
      }
      if (copy.how == conversion::e4m3_values || copy.how == conversion::e4m3_scales)
        check_e4m3(copy.from, bytes, done, copy.how == conversion::e4m3_scales);
      else
        check_finite(copy.from, bytes, done);
    }
    done += count;
  }
}

}  // namespace detail

/// Runs `body(i)` for i in [0, count), in any order and on any threads; serial when not given.
using parallel_runner = std::function<void(std::size_t count, const std::function<void(std::size_t)>& body)>;

/// The memory an op tree's leaves point at.
struct loaded_weights {
  host_arena arena;
  std::uint64_t copied_bytes = 0;
  std::vector<detail::weight_copy> unchecked;  ///< in the mapping, and not looked at yet

  /// Checks what load_weights left for later. Throws format_error.
  void check_the_rest(const parallel_runner& run) const {
    run(unchecked.size(), [this](std::size_t i) { detail::run_copy(unchecked[i]); });
  }
};

/// Says of a tensor that stays in the mapping whether its values are to be checked later, by
/// loaded_weights::check_the_rest: for those that may not be needed at all.
using check_later = std::function<bool(const io::tensor_slice&)>;

/// Binds every leaf of `op` to `source` and reads the weights.
///
/// First all names, types, shapes and scales are checked: if anything is wrong, one format_error lists all of
/// it and nothing has been read. Then the data is copied (or mapped, see load_mode), and E4M3 bytes, bf16 and
/// fp32 values are checked on the way. Cost: the tree's weight_bytes plus at most 64 bytes for each tensor.
template <class Op>
[[nodiscard]] loaded_weights load_weights(Op& op, io::checkpoint& source, const bind_options& options,
                                          load_mode mode = load_mode::copy, const parallel_runner& run = {},
                                          const check_later& later = {}) {
  constexpr std::uint64_t tensors_per_leaf = 2 * max_segments;
  loaded_weights weights{host_arena(weight_bytes<Op>() +
                                    host_arena::alignment_bytes * tensors_per_leaf * (leaf_count<Op>() + 1)),
                         0,
                         {}};
  binder bind(source, options, weights.arena, mode);
  for_each_leaf(op, bind);
  const bind_report& report = bind.finish();
  if (report.problems() != 0)
    throw format_error(source.folder().string() +
                       ": the checkpoint does not fit the model: " + report.text());
  std::vector<detail::weight_copy> copies;
  for (const auto& copy : bind.copies())
    (copy.to == nullptr && later && later(copy.from) ? weights.unchecked : copies).push_back(copy);
  const std::function<void(std::size_t)> body = [&](std::size_t i) { detail::run_copy(copies[i]); };
  if (run)
    run(copies.size(), body);
  else
    for (std::size_t i = 0; i < copies.size(); ++i) body(i);
  for (const auto& copy : copies)
    if (copy.to != nullptr) weights.copied_bytes += copy.from.bytes;
  return weights;
}

}  // namespace nibble
