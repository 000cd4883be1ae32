// SPDX-License-Identifier: Apache-2.0
/// \file
/// Decode: everything between the projection and the output matrix of a delta layer, one row per sequence.
///
/// A block has 32 columns of a value head and the head's blocks are a cluster: most blocks for few sequences.
/// Or it has the whole head, one run of 32 columns after another: least repeated for many. What does not
/// depend on the previous kernel (weights, states, conv windows) is read before the wait.
#pragma once

#include "nibble/kernels/delta_params.cuh"
#include "nibble/kernels/delta_step.cuh"
#include "nibble/kernels/norm_math.cuh"

namespace nibble {
namespace device {

// The blocks of a cluster exchange one number each. Sums travel with their own arrival (a transaction on the
// receiver's barrier): the cluster's own barrier would first wait until the states are written.

/// Tells the cluster that this block has begun and that its transaction barrier may be used. By all threads;
/// `barrier` was initialised by thread 0.
__device__ __forceinline__ void cluster_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_all_begun() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
/// Stores to the same shared variable of block `rank` of the cluster, and counts four bytes at its barrier.
__device__ __forceinline__ void send_to_cluster(float* variable, std::uint64_t* barrier, int rank,
                                                float value) {
#if __CUDA_ARCH__ >= 900
  std::uint32_t to, at;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(variable)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
               "r"(__float_as_uint(value)), "r"(at)
               : "memory");
#endif
}

/// What a thread needs for one channel of the convolution.
struct conv_channel {
  float4 weight;
  float x0, x1, x2;

  __device__ __forceinline__ void load(const float* weights, const __nv_bfloat16* window, int channels,
                                       int channel, int position) {
    weight = load_float4(weights + 4 * channel);
    x0 = load_bf16(window + ((position + 1) & 3) * channels + channel);
    x1 = load_bf16(window + ((position + 2) & 3) * channels + channel);
    x2 = load_bf16(window + ((position + 3) & 3) * channels + channel);
  }
  __device__ __forceinline__ float operator()(float x3) const { return conv_tap(weight, x0, x1, x2, x3); }
};

}  // namespace device

template <bool Clustered, int MinBlocks, bool NormedInput, int Hidden, int KeyHeads, int ValueHeads,
          int KeyDim, int ValueDim>
__global__ __launch_bounds__(device::delta_threads, MinBlocks) void delta_decode_kernel(
    const __grid_constant__ delta_rule_params p) {
  using namespace device;
  constexpr delta_shape shape{Hidden, KeyHeads, ValueHeads, KeyDim, ValueDim, 4};
  constexpr int splits = shape.splits(), channels = shape.channels();
  constexpr int columns = Clustered ? delta_columns : ValueDim, own_splits = columns / delta_columns;
  constexpr int runs = (Hidden + 2047) / 2048, split_floats = KeyDim * delta_columns;
  static_assert(2 * KeyDim <= delta_threads && columns <= delta_threads);
  __shared__ __align__(16) float qk[2 * KeyDim];
  __shared__ __align__(16) float partial[4][8];  // b, a, squares of q | k, of x; by warp
  __shared__ __align__(16) float values[columns], outputs[columns];
  __shared__ float squares[splits];
  __shared__ std::uint64_t arrived;
  const int t = static_cast<int>(threadIdx.x), warp = t >> 5, lane = t & 31;
  const int first_split = Clustered ? static_cast<int>(blockIdx.x) : 0;
  const int head = blockIdx.y, sequence = blockIdx.z, key_head = head / (ValueHeads / KeyHeads);

  // Before the wait.
  if constexpr (Clustered) {
    if (t == 0) {
      barrier_init(shared_address(&arrived), 1);
      barrier_init_fence();
      barrier_expect(shared_address(&arrived), 4 * splits);
    }
    __syncwarp();
    cluster_begin();
  }
  const int slot = load_int(p.step.slot + sequence), position = load_int(p.step.position + sequence);
  const int row = load_int(p.step.first_row + sequence);
  const bool padding = position < 0;
  std::byte* const base = p.pool.slot(padding ? 0 : slot);
  float* const state =
      reinterpret_cast<float*>(base) + static_cast<std::size_t>(head * splits + first_split) * split_floats;
  auto* const window = reinterpret_cast<__nv_bfloat16*>(base + shape.recurrent_bytes());
  uint4 wb[runs], wa[runs];
  norm_weights factor[NormedInput ? 1 : runs];
#pragma unroll
  for (int i = 0; i < runs; ++i) {
    const int k = 8 * t + 2048 * i;
    if (Hidden % 2048 == 0 || k < Hidden) {
      wb[i] = load_weights(p.ba + static_cast<std::size_t>(head) * Hidden + k);
      wa[i] = load_weights(p.ba + static_cast<std::size_t>(ValueHeads + head) * Hidden + k);
      if constexpr (!NormedInput) factor[i].load(p.input_norm + k, p.zero_centred);
    }
  }
  delta_fragment<KeyDim> s;
  conv_channel tap, v_tap;
  const bool has_qk = t < 2 * KeyDim, has_v = t < columns;
  const int channel = t < KeyDim ? key_head * KeyDim + t : shape.key_width() + key_head * KeyDim + t - KeyDim;
  const int v_channel = 2 * shape.key_width() + head * ValueDim + first_split * delta_columns + t;
  float norm = 0;
  if (!padding) {
    s.load(state, t);
    if (has_qk) tap.load(p.conv, window, channels, channel, position);
    if (has_v) {
      v_tap.load(p.conv, window, channels, v_channel, position);
      norm = load_float(p.norm + first_split * delta_columns + t);
    }
  }
  const float rate = expf(load_float(p.a_log + head)), dt_bias = load_float(p.dt_bias + head);

  wait_for_previous_grid();
  let_next_grid_start();
  __nv_bfloat16* const out =
      p.out + static_cast<std::size_t>(row) * p.ldo + head * ValueDim + first_split * delta_columns;
  if (padding) {
    if constexpr (Clustered) cluster_all_begun();
    if (has_v) out[t] = __float2bfloat16_rn(0.0f);
    return;
  }
  const __nv_bfloat16* const projected = p.qkvz + static_cast<std::size_t>(row) * p.ldqkvz;
  uint4 x[runs];
#pragma unroll
  for (int i = 0; i < runs; ++i)
    if (Hidden % 2048 == 0 || 8 * t + 2048 * i < Hidden)
      x[i] = load_16(p.x + static_cast<std::size_t>(row) * p.ldx + 8 * t + 2048 * i);
  float input = 0, z = 0;
  if (has_qk) input = load_bf16(projected + channel);
  if (has_v) {
    const float v = load_bf16(projected + v_channel);
    z = load_bf16(projected + v_channel + shape.value_width());
    window[(position & 3) * channels + v_channel] = __float2bfloat16_rn(v);
    values[t] = v_tap(v);
  }
  float b = 0, a = 0, x_squares = 0, square = 0;
  if (has_qk) {
    const float c = tap(input);
    qk[t] = c;
    square = __fmul_rn(c, c);
  }
#pragma unroll
  for (int i = 0; i < runs; ++i)
    if (Hidden % 2048 == 0 || 8 * t + 2048 * i < Hidden) {
      float xs[8], bs[8], as[8];
      unpack(xs, x[i]), unpack(bs, wb[i]), unpack(as, wa[i]);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if constexpr (!NormedInput) {
          x_squares = fmaf(xs[j], xs[j], x_squares);
          xs[j] *= factor[i].w[j];
        }
        b = fmaf(xs[j], bs[j], b), a = fmaf(xs[j], as[j], a);
      }
    }
  // Four sums over the warp at once: lane 0 ends with b, 1 with the squares of q | k, 2 with a, 3 with those
  // of x. Each is the tree of sum_lanes.
  {
    const bool odd = t & 1, upper = t & 2;
    float c = odd ? square : b, d = odd ? x_squares : a;
    c = __fadd_rn(c, __shfl_xor_sync(whole_warp, odd ? b : square, 1));
    d = __fadd_rn(d, __shfl_xor_sync(whole_warp, odd ? a : x_squares, 1));
    c = __fadd_rn(upper ? d : c, __shfl_xor_sync(whole_warp, upper ? c : d, 2));
#pragma unroll
    for (int bit = 4; bit < 32; bit *= 2) c = __fadd_rn(c, __shfl_xor_sync(whole_warp, c, bit));
    if (lane < 4) partial[lane == 0 ? 0 : lane == 1 ? 2 : lane == 2 ? 1 : 3][warp] = c;
  }
  __syncthreads();

  constexpr int warps = delta_threads / 32, key_warps = KeyDim / 32;
  b = sum_in_order<warps>(partial[0]), a = sum_in_order<warps>(partial[1]);
  if constexpr (!NormedInput) {
    const float r = rsqrtf(sum_in_order<warps>(partial[3]) * (1.0f / Hidden) + p.eps);
    b *= r, a *= r;
  }
  const delta_gates gates = gates_of(b, a, rate, dt_bias);
  const float q_factor = l2_factor(sum_in_order<key_warps>(partial[2]), query_scale<KeyDim>);
  const float k_factor = l2_factor(sum_in_order<key_warps>(partial[2] + key_warps), 1.0f);
  constexpr int rows = delta_fragment<KeyDim>::rows;
  float k[rows], q[rows];
  load_key<KeyDim>(k, qk + KeyDim, t);
  load_key<KeyDim>(q, qk, t);
#pragma unroll
  for (int j = 0; j < rows; ++j) k[j] = __fmul_rn(k[j], k_factor), q[j] = __fmul_rn(q[j], q_factor);
  const int pair = t / 16;
#pragma unroll
  for (int i = 0; i < own_splits; ++i) {
    delta_fragment<KeyDim> next;
    if (i + 1 < own_splits) next.load(state + (i + 1) * split_floats, t);
    const float2 seen = sum_columns(s.dot(k));
    const float2 v = *reinterpret_cast<const float2*>(&values[delta_columns * i + 2 * pair]);
    s.decay(gates.decay);
    s.add(k, delta_of(v, seen, gates.decay, gates.beta));
    s.store(state + i * split_floats, t);
    const float o = sum_own_column(s.dot(q));
    if ((t & 14) == 0) outputs[delta_columns * i + 2 * pair + (t & 1)] = o;
    s = next;
  }
  if (has_qk && first_split == 0 && head % (ValueHeads / KeyHeads) == 0)
    window[(position & 3) * channels + channel] = __float2bfloat16_rn(input);
  __syncthreads();
  if constexpr (Clustered) cluster_all_begun();
  float own = 0;
  if (has_v) {
    own = outputs[t];
    const float part = sum_lanes(__fmul_rn(own, own));
    if constexpr (Clustered) {
      if (t < splits) send_to_cluster(&squares[first_split], &arrived, t, part);
      barrier_wait(shared_address(&arrived), 0);  // and no block ends before all that is sent to it has come
    } else {
      if (lane == 0) squares[warp] = part;
    }
  }
  if constexpr (!Clustered) __syncthreads();
  if (has_v) {
    float all[splits];
#pragma unroll
    for (int i = 0; i < splits; ++i) all[i] = squares[i];
    out[t] = __float2bfloat16_rn(gated(own, gated_norm_factor<splits>(all, p.eps), norm, z));
  }
}

}  // namespace nibble
