// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cassert>
#include <nibble/host/activation.hpp>
#include <nibble/host/detail/matmul_rows.hpp>
#include <nibble/host/detail/scratch.hpp>
#include <nibble/host/experts.hpp>
#include <vector>

namespace nibble::host {
namespace {

/// Tokens that one pass takes: bounds the memory, and is long past the point where every expert is busy.
constexpr int pass_tokens = 512;
/// Weight bytes of one task; see linear().
constexpr std::size_t task_bytes = 64 * 1024;

/// An expert with the (token, slot) pairs that chose it: pairs [begin, end) of the pass's list.
struct group {
  const expert_weights* expert;
  int begin;
  int end;
};

/// What a pass keeps between its stages; all vectors are reused by later calls of the thread.
struct pass_memory {
  std::vector<group> groups;
  std::vector<int> pair_of_slot;  ///< [tokens · top_k]: where the slot's pair lies in the list, or -1
  std::vector<int> token_of_pair;
  std::vector<int> first_of_expert;
  std::vector<const float*> x_rows, h_rows;
  std::vector<float*> gate_rows, up_rows, y_rows;
  detail::scratch packed_x, gate, up, packed_h, y;
};

std::int64_t panel_rows(const weight_view& weight) {
  const std::size_t row_bytes = std::max<std::size_t>(weight.bytes() / static_cast<std::size_t>(weight.n), 1);
  return std::max<std::int64_t>(static_cast<std::int64_t>(task_bytes / row_bytes) / 2 * 2, 2);
}

/// Row pointers of `rows` packed rows of x; packs where the format wants it.
void pack_rows(thread_pool& pool, weight_format format, int k, const float* x, std::ptrdiff_t ldx, int rows,
               detail::scratch& memory, std::vector<const float*>& out) {
  out.resize(static_cast<std::size_t>(rows));
  if (detail::is_packed(format, k)) {
    for (int r = 0; r < rows; ++r) out[static_cast<std::size_t>(r)] = x + r * ldx;
    return;
  }
  const std::ptrdiff_t length = detail::packed_length(format, k);
  float* packed = memory.take(static_cast<std::size_t>(length) * static_cast<std::size_t>(rows));
  pool.parallel_for(rows, std::max<std::int64_t>(32768 / std::max<std::ptrdiff_t>(length, 1), 1),
                    [=](std::int64_t begin, std::int64_t end) {
                      for (std::int64_t r = begin; r < end; ++r)
                        detail::pack_row(format, x + r * ldx, k, packed + r * length);
                    });
  for (int r = 0; r < rows; ++r) out[static_cast<std::size_t>(r)] = packed + r * length;
}

void rows_of(float* base, std::ptrdiff_t stride, int rows, std::vector<float*>& out) {
  out.resize(static_cast<std::size_t>(rows));
  for (int r = 0; r < rows; ++r) out[static_cast<std::size_t>(r)] = base + r * stride;
}

/// Runs body(group, first row, last row) for all groups, `panel` rows of `n` at a time.
template <class Body>
void for_panels(thread_pool& pool, const std::vector<group>& groups, int n, std::int64_t panel,
                const Body& body) {
  const std::int64_t panels = (n + panel - 1) / panel;
  pool.parallel_for(static_cast<std::int64_t>(groups.size()) * panels, 1,
                    [&](std::int64_t begin, std::int64_t end) {
                      for (std::int64_t task = begin; task < end; ++task) {
                        const std::int64_t first = task % panels * panel;
                        body(groups[static_cast<std::size_t>(task / panels)], static_cast<int>(first),
                             static_cast<int>(std::min<std::int64_t>(first + panel, n)));
                      }
                    });
}

/// Fills m.y with the experts' outputs, one row for each pair of m.groups. Weights stream once.
void run_groups(thread_pool& pool, const float* x, std::ptrdiff_t ldx, int tokens, int pairs,
                pass_memory& m) {
  const expert_weights& shape = *m.groups.front().expert;
  const int hidden = shape.gate.k, intermediate = shape.gate.n, outputs = shape.down.n;
  const auto pair_count = static_cast<std::size_t>(pairs);
  // Gate and up of one layer share a format as a rule; where they do not, each takes rows packed its own way.
  std::vector<const float*>& x_rows = m.x_rows;
  float* gate = m.gate.take(pair_count * static_cast<std::size_t>(intermediate));
  float* up = m.up.take(pair_count * static_cast<std::size_t>(intermediate));
  rows_of(gate, intermediate, pairs, m.gate_rows);
  rows_of(up, intermediate, pairs, m.up_rows);
  const auto input_product = [&](weight_view expert_weights::*part, std::vector<float*>& to) {
    const weight_format format = (shape.*part).format;
    thread_local std::vector<const float*> packed;
    pack_rows(pool, format, hidden, x, ldx, tokens, m.packed_x, packed);
    x_rows.resize(pair_count);
    for (std::size_t p = 0; p < pair_count; ++p)
      x_rows[p] = packed[static_cast<std::size_t>(m.token_of_pair[p])];
    for_panels(pool, m.groups, intermediate, panel_rows(shape.*part),
               [&](const group& g, int first, int last) {
                 detail::matmul_rows(g.expert->*part, first, last, x_rows.data() + g.begin, g.end - g.begin,
                                     to.data() + g.begin);
               });
  };
  if (shape.gate.format == shape.up.format) {
    thread_local std::vector<const float*> packed;
    pack_rows(pool, shape.gate.format, hidden, x, ldx, tokens, m.packed_x, packed);
    x_rows.resize(pair_count);
    for (std::size_t p = 0; p < pair_count; ++p)
      x_rows[p] = packed[static_cast<std::size_t>(m.token_of_pair[p])];
    const std::int64_t panel = std::max<std::int64_t>(panel_rows(shape.gate) / 4 * 2, 2);
    for_panels(pool, m.groups, intermediate, panel, [&](const group& g, int first, int last) {
      const int count = g.end - g.begin;
      detail::matmul_rows(g.expert->gate, first, last, x_rows.data() + g.begin, count,
                          m.gate_rows.data() + g.begin);
      detail::matmul_rows(g.expert->up, first, last, x_rows.data() + g.begin, count,
                          m.up_rows.data() + g.begin);
      for (int p = g.begin; p < g.end; ++p) {
        float* h = m.gate_rows[static_cast<std::size_t>(p)] + first;
        swiglu(h, m.up_rows[static_cast<std::size_t>(p)] + first, h, static_cast<std::size_t>(last - first));
      }
    });
  } else {
    input_product(&expert_weights::gate, m.gate_rows);
    input_product(&expert_weights::up, m.up_rows);
    swiglu(gate, up, gate, pair_count * static_cast<std::size_t>(intermediate));
  }
  pack_rows(pool, shape.down.format, intermediate, gate, intermediate, pairs, m.packed_h, m.h_rows);
  rows_of(m.y.take(pair_count * static_cast<std::size_t>(outputs)), outputs, pairs, m.y_rows);
  for_panels(pool, m.groups, outputs, panel_rows(shape.down), [&](const group& g, int first, int last) {
    detail::matmul_rows(g.expert->down, first, last, m.h_rows.data() + g.begin, g.end - g.begin,
                        m.y_rows.data() + g.begin);
  });
}

/// Groups the pass's slots by expert, in ascending order of tokens within an expert. Returns the pairs.
int group_slots(std::span<const expert_weights> experts, const std::int32_t* ids, int top_k, int tokens,
                pass_memory& m) {
  const std::size_t slots = static_cast<std::size_t>(tokens) * static_cast<std::size_t>(top_k);
  m.first_of_expert.assign(experts.size() + 1, 0);
  for (std::size_t s = 0; s < slots; ++s)
    if (ids[s] >= 0) ++m.first_of_expert[static_cast<std::size_t>(ids[s]) + 1];
  for (std::size_t e = 0; e < experts.size(); ++e) m.first_of_expert[e + 1] += m.first_of_expert[e];
  const int pairs = m.first_of_expert[experts.size()];
  m.groups.clear();
  for (std::size_t e = 0; e < experts.size(); ++e)
    if (m.first_of_expert[e] < m.first_of_expert[e + 1])
      m.groups.push_back({&experts[e], m.first_of_expert[e], m.first_of_expert[e + 1]});
  m.pair_of_slot.assign(slots, -1);
  m.token_of_pair.resize(static_cast<std::size_t>(pairs));
  for (std::size_t s = 0; s < slots; ++s)
    if (ids[s] >= 0) {
      const int pair = m.first_of_expert[static_cast<std::size_t>(ids[s])]++;
      m.pair_of_slot[s] = pair;
      m.token_of_pair[static_cast<std::size_t>(pair)] = static_cast<int>(s / static_cast<std::size_t>(top_k));
    }
  return pairs;
}

pass_memory& this_threads_memory() {
  thread_local pass_memory memory;
  return memory;
}

}  // namespace

void routed_experts(thread_pool& pool, std::span<const expert_weights> experts, const std::int32_t* ids,
                    const float* weights, int top_k, const float* x, std::ptrdiff_t ldx, int m, float* y,
                    std::ptrdiff_t ldy) {
  if (experts.empty()) return;
  const int hidden = experts.front().down.n;
  pass_memory& memory = this_threads_memory();
  for (int done = 0; done < m; done += pass_tokens) {
    const int tokens = std::min(pass_tokens, m - done);
    const std::int32_t* pass_ids = ids + static_cast<std::ptrdiff_t>(done) * top_k;
    const int pairs = group_slots(experts, pass_ids, top_k, tokens, memory);
    if (pairs > 0) run_groups(pool, x + done * ldx, ldx, tokens, pairs, memory);
    const std::int64_t grain = std::max<std::int64_t>(32768 / std::max(hidden * top_k, 1), 1);
    pool.parallel_for(tokens, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        float* to = y + (done + r) * ldy;
        std::fill(to, to + hidden, 0.0f);
        for (int s = 0; s < top_k; ++s) {
          const int pair = memory.pair_of_slot[static_cast<std::size_t>(r * top_k + s)];
          if (pair < 0) continue;
          const float* part = memory.y_rows[static_cast<std::size_t>(pair)];
          const float weight = weights[(done + r) * top_k + s];
          for (int i = 0; i < hidden; ++i) to[i] += weight * part[i];
        }
      }
    });
  }
}

void shared_expert(thread_pool& pool, const expert_weights& expert, const weight_view& gate_row,
                   const float* x, std::ptrdiff_t ldx, int m, float* y, std::ptrdiff_t ldy) {
  const int hidden = expert.down.n;
  thread_local std::vector<float> factors;
  pass_memory& memory = this_threads_memory();
  for (int done = 0; done < m; done += pass_tokens) {
    const int tokens = std::min(pass_tokens, m - done);
    factors.assign(static_cast<std::size_t>(tokens), 1.0f);
    if (gate_row.n > 0) {
      linear(pool, gate_row, x + done * ldx, ldx, tokens, factors.data(), 1);
      sigmoid(factors.data(), factors.data(), factors.size());
    }
    memory.groups.assign(1, {&expert, 0, tokens});
    memory.token_of_pair.resize(static_cast<std::size_t>(tokens));
    for (int r = 0; r < tokens; ++r) memory.token_of_pair[static_cast<std::size_t>(r)] = r;
    run_groups(pool, x + done * ldx, ldx, tokens, tokens, memory);
    const float* factor = factors.data();
    pool.parallel_for(tokens, std::max<std::int64_t>(32768 / std::max(hidden, 1), 1),
                      [&, factor](std::int64_t begin, std::int64_t end) {
                        for (std::int64_t r = begin; r < end; ++r) {
                          float* to = y + (done + r) * ldy;
                          const float* part = memory.y_rows[static_cast<std::size_t>(r)];
                          for (int i = 0; i < hidden; ++i) to[i] += factor[r] * part[i];
                        }
                      });
  }
}

}  // namespace nibble::host
