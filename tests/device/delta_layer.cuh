// SPDX-License-Identifier: Apache-2.0
/// \file
/// A delta-rule layer with its fp64 twin, for the tests of its kernels.
#pragma once

#include <cmath>

#include "delta_tolerance.hpp"
#include "device_test.cuh"
#include "nibble/core/bf16.hpp"
#include "nibble/kernels/delta_decode.cuh"
#include "nibble/kernels/delta_prefill.cuh"
#include "nibble/ref/conv.hpp"
#include "nibble/ref/delta_rule.hpp"
#include "nibble/ref/norm.hpp"
#include "random_matrix.hpp"

namespace delta_test {

using namespace nibble;
using device_test::buffer;
using bf = __nv_bfloat16;

inline constexpr delta_shape tiny{256, 2, 4, 64, 64, 4};
inline constexpr delta_shape full{2048, 16, 32, 128, 128, 4};
inline constexpr delta_shape odd{1280, 2, 6, 128, 64, 4};   // three value heads to a key head
inline constexpr delta_shape narrow{768, 1, 2, 64, 32, 4};  // one split
inline constexpr int slots = 9, layer_offset = 512;

inline std::vector<std::uint16_t> random_rows(std::size_t count, std::uint64_t seed, double scale) {
  std::vector<std::uint16_t> v(count);
  device_test::fast_random random{seed};
  for (auto& e : v) {
    double s = 0;
    for (int i = 0; i < 4; ++i) s += static_cast<double>(random() >> 40) * 0x1p-24 - 0.5;
    e = bf16::encode(static_cast<float>(s * 1.7 * scale));
  }
  return v;
}
inline std::vector<float> random_floats(std::size_t count, std::uint64_t seed, double low, double high) {
  std::vector<float> v(count);
  device_test::fast_random random{seed};
  for (auto& e : v)
    e = static_cast<float>(low + (high - low) * static_cast<double>(random() >> 11) * 0x1p-53);
  return v;
}
inline std::vector<double> wide(const std::vector<float>& v) { return {v.begin(), v.end()}; }

/// exact: sums are exact in any order; hard: extreme gates, equal keys, outliers among the values.
enum class content { plain, exact, hard };

/// A layer's weights, its pool of states, and the fp64 state of each slot.
struct layer {
  delta_shape s;
  std::vector<std::uint16_t> ba;
  std::vector<float> conv, a_log, dt_bias, norm, input_norm;
  buffer<std::uint16_t> d_ba;
  buffer<float> d_conv, d_a_log, d_dt_bias, d_norm, d_input_norm;
  std::size_t slot_bytes;
  buffer<std::uint8_t> pool;
  std::vector<std::vector<double>> state, window;
  std::vector<delta_error> error;

  layer(const delta_shape& of, std::uint64_t seed, content kind = content::plain, int slot_count = slots)
      : s(of),
        ba(gate_rows(of, seed + 1, kind)),
        conv(random_floats(std::size_t{4} * of.channels(), seed + 2, -0.6, 0.9)),
        a_log(rates(of, seed + 3, kind)),
        dt_bias(random_floats(of.value_heads, seed + 4, -2, 1)),
        norm(random_floats(of.value_dim, seed + 5, 0.5, 1.5)),
        input_norm(random_floats(of.hidden, seed + 6, -0.3, 0.3)),
        d_ba(kind == content::exact ? coarsen(ba) : ba),
        d_conv(conv),
        d_a_log(a_log),
        d_dt_bias(dt_bias),
        d_norm(norm),
        d_input_norm(input_norm),
        slot_bytes(layer_offset + state_bytes(of) + 256),
        pool(slot_bytes * static_cast<std::size_t>(slot_count)),
        state(slot_count, std::vector<double>(of.recurrent_bytes() / 4)),
        window(slot_count, std::vector<double>(std::size_t{3} * of.channels())),
        error(slot_count, delta_error(of)) {}

  /// Hard: β is 0, 1 or anything, by head.
  static std::vector<std::uint16_t> gate_rows(const delta_shape& s, std::uint64_t seed, content kind) {
    auto v = random_rows(std::size_t{2} * s.value_heads * s.hidden, seed, 1.0 / std::sqrt(s.hidden));
    if (kind == content::hard)
      for (int h = 0; h < s.value_heads; h += 2)
        for (int i = 0; i < s.hidden; ++i) {
          auto& e = v[static_cast<std::size_t>(h) * s.hidden + i];
          e = bf16::encode(256 * bf16::decode(e));
        }
    return v;
  }
  /// Hard: decays of some heads are 1 or almost, of others 0 or almost.
  static std::vector<float> rates(const delta_shape& s, std::uint64_t seed, content kind) {
    auto v = random_floats(s.value_heads, seed, -3, 1);
    constexpr float hard[] = {-12, 6, 4.5f, -40};
    if (kind == content::hard)
      for (std::size_t h = 0; h < v.size(); ++h) v[h] = hard[h % 4];
    return v;
  }
  /// Multiples of 2^-6: sums of products with multiples of 2^-3 are exact in any order.
  static std::vector<std::uint16_t>& coarsen(std::vector<std::uint16_t>& v) {
    for (auto& e : v) e = bf16::encode(std::round(bf16::decode(e) * 64.0f) / 64.0f);
    return v;
  }
  state_pool view() const { return {reinterpret_cast<std::byte*>(pool.data()), slot_bytes, layer_offset}; }
  template <delta_shape S>
  void clear(int slot) {
    NIBBLE_GOOD(clear_delta_state<S>(view(), slot, device_test::stream()));
    NIBBLE_CUDA_CHECK(cudaStreamSynchronize(device_test::stream()));
    std::fill(state[slot].begin(), state[slot].end(), 0.0);
    std::fill(window[slot].begin(), window[slot].end(), 0.0);
    error[slot] = delta_error(s);
  }

  /// The gates of `rows` rows in fp64, and how far those of a kernel may be away.
  gates gates_of(const std::vector<double>& x, int rows) const {
    return delta_test::gates_of(s, x, ba, wide(a_log), wide(dt_bias), rows);
  }

  /// What went into the convolution's results: they may be small where their terms cancel.
  std::vector<double> conv_sizes(const std::vector<double>& inputs, const std::vector<double>& before) const {
    const auto sizes = [](std::vector<double> of) {
      for (double& e : of) e = std::fabs(e);
      return of;
    };
    auto window_sizes = sizes(before);
    auto y = ref::causal_conv_silu(sizes(inputs), sizes(wide(conv)), 4, s.channels(), window_sizes);
    for (double& e : y) e *= 2;  // silu of what is positive is at least half of it
    return y;
  }

  /// The fp64 outputs of `rows` rows appended to a slot's sequence.
  /// \param given the gates a kernel has computed and `gates_of` has approved; without, those of fp64, and
  /// what a kernel's may differ is part of the tolerance
  expectation expect(int slot, const std::vector<double>& qkvz, const std::vector<double>& x, int rows,
                     bool raw, const gates* given = nullptr) {
    const gates g =
        given != nullptr ? *given : gates_of(raw ? ref::rms_norm(x, wide(input_norm), true, 1e-6) : x, rows);
    const auto channels = static_cast<std::size_t>(s.channels());
    std::vector<double> inputs(rows * channels), z(rows * static_cast<std::size_t>(s.value_width()));
    for (int r = 0; r < rows; ++r) {
      const double* from = qkvz.data() + static_cast<std::size_t>(r) * s.projected();
      std::copy_n(from, channels, inputs.begin() + r * channels);
      std::copy_n(from + channels, s.value_width(), z.begin() + r * s.value_width());
    }
    const auto sizes = conv_sizes(inputs, window[slot]);
    const auto y = ref::causal_conv_silu(inputs, wide(conv), 4, s.channels(), window[slot]);
    std::vector<double> q, k, v, v_sizes;
    for (int r = 0; r < rows; ++r) {
      v_sizes.insert(v_sizes.end(), sizes.data() + r * channels + 2 * s.key_width(),
                     sizes.data() + (r + 1) * channels);
      const double* from = y.data() + r * channels;
      q.insert(q.end(), from, from + s.key_width());
      k.insert(k.end(), from + s.key_width(), from + 2 * s.key_width());
      v.insert(v.end(), from + 2 * s.key_width(), from + channels);
    }
    q = ref::l2_norm(q, s.key_dim, 1e-6, 1 / std::sqrt(s.key_dim));
    k = ref::l2_norm(k, s.key_dim, 1e-6, 1);
    std::vector<double> o, lost;  // lost: how far o may be away
    const auto row_of = [](const std::vector<double>& all, int row, int width) {
      return std::vector<double>(all.begin() + static_cast<std::ptrdiff_t>(row) * width,
                                 all.begin() + static_cast<std::ptrdiff_t>(row + 1) * width);
    };
    for (int r = 0; r < rows; ++r) {
      std::vector<double> log_decay = row_of(g.decay, r, s.value_heads);
      for (double& e : log_decay) e = std::log(e);
      const auto out =
          ref::delta_rule(row_of(q, r, s.key_width()), row_of(k, r, s.key_width()),
                          row_of(v, r, s.value_width()), log_decay, row_of(g.beta, r, s.value_heads),
                          {s.key_heads, s.value_heads, s.key_dim, s.value_dim}, state[slot]);
      o.insert(o.end(), out.begin(), out.end());
      const auto of_row = error[slot].after(s, g, r, given == nullptr, row_of(v_sizes, r, s.value_width()),
                                            error[slot].largest_to_come(s, v_sizes, r, rows), state[slot]);
      lost.insert(lost.end(), of_row.begin(), of_row.end());
    }
    return {ref::gated_rms_norm(o, z, wide(norm), 1e-6), gated_tolerance(s, o, lost, z, wide(norm), 1e-6)};
  }

  /// The slot's state against the fp64 one, and the window's last three inputs.
  void check_state(int slot, int position) {
    const auto bytes = pool.read();
    const std::uint8_t* at = bytes.data() + slot_bytes * slot + layer_offset;
    worst_case worst;
    for (int h = 0; h < s.value_heads; ++h)
      for (int i = 0; i < s.key_dim; ++i)
        for (int c = 0; c < s.value_dim; ++c) {
          float got;
          std::memcpy(&got, at + 4 * state_index(s, h, i, c), 4);
          worst.add(got, state[slot][(static_cast<std::size_t>(h) * s.key_dim + i) * s.value_dim + c],
                    error[slot].of_state(h * s.value_dim + c), i, h, c);
        }
    NIBBLE_CHECK(worst.good("state: row", slot));
    bool window_good = true;
    for (int back = 1; back <= 3 && back <= position; ++back)
      for (int c = 0; c < s.channels(); ++c) {
        std::uint16_t got;
        std::memcpy(&got,
                    at + s.recurrent_bytes() +
                        2 * (static_cast<std::size_t>((position - back) & 3) * s.channels() + c),
                    2);
        window_good = window_good && bf16::decode(got) ==
                                         window[slot][static_cast<std::size_t>(3 - back) * s.channels() + c];
      }
    NIBBLE_CHECK(window_good);
  }
};

/// Rows of a step with strides wider than the rows.
struct step_rows {
  const delta_shape& s;
  int rows, ldq, ldx, ldo;
  std::vector<std::uint16_t> qkvz, x;
  buffer<std::uint16_t> d_qkvz, d_x, d_out;

  step_rows(const delta_shape& of, int count, std::uint64_t seed, content kind = content::plain)
      : s(of),
        rows(count),
        ldq(of.projected() + 8),
        ldx(of.hidden + 16),
        ldo(of.value_width() + 24),
        qkvz(projected_rows(of, count, ldq, seed, kind)),
        x(random_rows(static_cast<std::size_t>(count) * ldx, seed + 1, 1)),
        d_qkvz(qkvz),
        d_x(kind == content::exact ? coarsen(x) : x),
        d_out(static_cast<std::size_t>(count) * ldo) {}
  /// Hard: keys of even heads repeat from row to row, those of odd heads almost; of a thousand values one is
  /// a thousand times larger.
  static std::vector<std::uint16_t> projected_rows(const delta_shape& s, int rows, int ld, std::uint64_t seed,
                                                   content kind) {
    auto v = random_rows(static_cast<std::size_t>(rows) * ld, seed, 1);
    if (kind != content::hard) return v;
    device_test::fast_random random{seed + 5};
    for (int r = 0; r < rows; ++r) {
      std::uint16_t* row = v.data() + static_cast<std::size_t>(r) * ld;
      for (int i = 0; i < s.key_width(); ++i) {
        auto& e = row[s.key_width() + i];
        const float same = static_cast<float>(1 + i % 5);
        e = bf16::encode(i / s.key_dim % 2 == 0 ? same : same + 0.05f * bf16::decode(e));
      }
      for (int i = 0; i < s.value_width(); ++i)
        if (random() % 1000 == 0) {
          auto& e = row[2 * s.key_width() + i];
          e = bf16::encode(1000 * bf16::decode(e));
        }
    }
    return v;
  }
  static std::vector<std::uint16_t>& coarsen(std::vector<std::uint16_t>& v) {
    for (auto& e : v) e = bf16::encode(std::round(bf16::decode(e) * 8.0f) / 8.0f);
    return v;
  }
  std::vector<double> part(const std::vector<std::uint16_t>& of, int ld, int width, int first,
                           int count) const {
    std::vector<double> out;
    for (int r = first; r < first + count; ++r)
      for (int c = 0; c < width; ++c) out.push_back(bf16::decode(of[static_cast<std::size_t>(r) * ld + c]));
    return out;
  }
  void check(const std::vector<std::uint16_t>& got, int first, int count, const expectation& want) const {
    worst_case worst;
    for (int r = 0; r < count; ++r)
      for (int c = 0; c < s.value_width(); ++c) {
        const std::size_t at = static_cast<std::size_t>(r) * s.value_width() + c;
        worst.add(bf16::decode(got[static_cast<std::size_t>(first + r) * ldo + c]), want.out[at],
                  want.tolerance[at], r, c / s.value_dim, c % s.value_dim);
      }
    NIBBLE_CHECK(worst.good("out: row", first));
  }
  bool only_rows_written(const std::vector<std::uint16_t>& got, const std::vector<bool>& written) const {
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < ldo; ++c)
        if ((c >= s.value_width() || !written[r]) && got[static_cast<std::size_t>(r) * ldo + c] != 0xFFFF)
          return false;
    return true;
  }
};

struct device_step {
  buffer<std::int32_t> first_row, position, slot;
  int sequences;
  device_step(const std::vector<std::int32_t>& f, const std::vector<std::int32_t>& p,
              const std::vector<std::int32_t>& s)
      : first_row(f), position(p), slot(s), sequences(static_cast<int>(p.size())) {}
  step_view view() const {
    step_view v;
    v.sequences = sequences, v.first_row = first_row.data(), v.position = position.data(),
    v.slot = slot.data();
    return v;
  }
};

inline delta_rule_params params_of(const layer& l, const step_rows& r, const device_step& step) {
  delta_rule_params p;
  p.step = step.view(), p.pool = l.view();
  p.qkvz = reinterpret_cast<const bf*>(r.d_qkvz.data()), p.ldqkvz = r.ldq;
  p.x = reinterpret_cast<const bf*>(r.d_x.data()), p.ldx = r.ldx;
  p.out = reinterpret_cast<bf*>(r.d_out.data()), p.ldo = r.ldo;
  p.ba = reinterpret_cast<const bf*>(l.d_ba.data()), p.conv = l.d_conv.data(), p.a_log = l.d_a_log.data();
  p.dt_bias = l.d_dt_bias.data(), p.norm = l.d_norm.data(), p.eps = 1e-6f;
  p.input_norm = l.d_input_norm.data(), p.zero_centred = true;
  return p;
}
inline const launch_options plain{device_test::stream(), launch_chain::plain};
inline const launch_options chained{device_test::stream(), device_test::chained};

template <class Family>
void load() {
  NIBBLE_GOOD(Family::for_each_kernel([](auto kernel, int threads, std::size_t shared, const char* name) {
    kernel_info info;
    const status s = prepare(kernel, threads, shared, name, &info);
    NIBBLE_CHECK(!s.ok() || info.local_bytes <= device_test::allowed_local_bytes);
    return s;
  }));
}

/// Unequal sequences in one launch, after a first part of some of them.
template <delta_shape S>
void prefill_sequences(std::uint64_t seed, std::vector<int> lengths, content kind = content::plain,
                       int launches = 2) {
  using family = delta_prefill_family<S>;
  load<family>();
  const int slot_count = lengths.size() <= slots ? slots : 41;
  layer l(S, seed, kind, slot_count);
  std::vector<std::int32_t> slot, position;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    slot.push_back(static_cast<std::int32_t>((5 * i + 2) % static_cast<std::size_t>(slot_count)));
    position.push_back(0);
    l.clear<S>(slot.back());
  }
  for (int part = 0; part < launches; ++part) {
    std::vector<std::int32_t> first{3};
    for (const int n : lengths) first.push_back(first.back() + n);
    const int total = first.back() - 3;
    std::vector<std::int32_t> given = position;
    if (part == 1) given[0] = -1;  // padding now
    step_rows r(S, total + 4, seed + 7 + static_cast<std::uint64_t>(part), kind);
    const device_step d(first, given, slot);
    buffer<std::byte> workspace(delta_prefill_workspace_bytes(S, total));
    auto p = params_of(l, r, d);
    p.rows = total, p.workspace = workspace.data();
    NIBBLE_GOOD(family::launch(p, part == 0 ? chained : plain));
    const auto got = r.d_out.read();
    const auto work = workspace.read();
    std::vector<bool> written(static_cast<std::size_t>(total + 4), true);
    written[0] = written[1] = written[2] = written[static_cast<std::size_t>(total + 3)] = false;
    NIBBLE_CHECK(r.only_rows_written(got, written));
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      if (given[i] < 0) {
        for (int row = first[i]; row < first[i + 1]; ++row)
          for (int c = 0; c < S.value_width(); ++c)
            NIBBLE_CHECK(got[static_cast<std::size_t>(row) * r.ldo + c] == 0);
        continue;
      }
      // Where a gate's logit is large its error in fp32 is, too: gates are judged by themselves, and what
      // the recurrence makes of them by what it was given.
      const auto x = r.part(r.x, r.ldx, S.hidden, first[i], lengths[i]);
      gates g = l.gates_of(x, lengths[i]);
      g.take(S, work.data() + std::size_t{4} * S.channels() * total, first[i] - 3, lengths[i]);
      r.check(got, first[i], lengths[i],
              l.expect(slot[i], r.part(r.qkvz, r.ldq, S.projected(), first[i], lengths[i]), x, lengths[i],
                       false, &g));
      position[i] += lengths[i];
    }
    std::rotate(lengths.begin(), lengths.begin() + 1, lengths.end());
  }
  for (std::size_t i = 0; i < slot.size(); ++i) l.check_state(slot[i], position[i]);
}

/// One prompt whole, in pieces, in pieces beside a stranger; and, where asked for, token by token through the
/// decode kernel, sums being exact: the same bits.
template <delta_shape S>
void cuts(std::uint64_t seed, int length, const std::vector<std::vector<int>>& ways, bool decode = true) {
  load<delta_prefill_family<S>>();
  load<delta_decode_family<S>>();
  constexpr int stranger_rows = 100;
  const step_rows r(S, length + stranger_rows, seed, content::exact);
  std::vector<std::uint16_t> outputs[2];
  std::vector<std::uint8_t> first_state;
  for (std::size_t way = 0; way < ways.size() + (decode ? 1 : 0); ++way) {
    layer l(S, seed + 1, content::exact);
    for (int s = 0; s < slots; ++s) l.clear<S>(s);
    NIBBLE_CUDA_CHECK(cudaMemsetAsync(r.d_out.data(), 0xFF, r.d_out.bytes(), device_test::stream()));
    const bool decoded = way == ways.size();
    std::vector<int> pieces = decoded ? std::vector<int>(static_cast<std::size_t>(length), 1) : ways[way];
    int done = 0, piece = 0;
    for (const int n : pieces) {
      // A stranger shares every second launch.
      const bool stranger = !decoded && piece++ % 2 == 1;
      const device_step d(stranger ? std::vector<std::int32_t>{done, done + n, done + n + stranger_rows}
                                   : std::vector<std::int32_t>{done, done + n},
                          stranger ? std::vector<std::int32_t>{done, 0} : std::vector<std::int32_t>{done},
                          stranger ? std::vector<std::int32_t>{5, 6} : std::vector<std::int32_t>{5});
      auto p = params_of(l, r, d);
      p.rows = n + (stranger ? stranger_rows : 0);
      buffer<std::byte> workspace(delta_prefill_workspace_bytes(S, p.rows));
      p.workspace = workspace.data();
      if (stranger) l.clear<S>(6);
      NIBBLE_GOOD(decoded ? delta_decode_family<S>::launch(p, plain)
                          : delta_prefill_family<S>::launch(p, chained));
      NIBBLE_CUDA_CHECK(cudaStreamSynchronize(device_test::stream()));
      done += n;
    }
    NIBBLE_CHECK(done == length);
    const auto got = r.d_out.read();
    const auto bytes = l.pool.read();
    const std::vector<std::uint16_t> out(got.begin(),
                                         got.begin() + static_cast<std::ptrdiff_t>(length) * r.ldo);
    const std::vector<std::uint8_t> state(bytes.begin() + static_cast<std::ptrdiff_t>(5 * l.slot_bytes),
                                          bytes.begin() + static_cast<std::ptrdiff_t>(6 * l.slot_bytes));
    if (way == 0) {
      outputs[0] = out, first_state = state;
    } else {
      NIBBLE_CHECK(out == outputs[0]);
      NIBBLE_CHECK(state == first_state);
    }
  }
}

}  // namespace delta_test
