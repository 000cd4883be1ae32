// SPDX-License-Identifier: Apache-2.0
/// \file
/// Decode: everything between the projection and the output matrix of a delta layer, one row per sequence.
///
/// A block has 32 columns of a value head and the head's blocks are a cluster, or it has the whole head in
/// groups of 128 threads. What does not depend on the previous kernel (weights, states, conv windows) is read
/// before the wait.
#pragma once

#include "nibble/kernels/delta_params.cuh"
#include "nibble/kernels/delta_step.cuh"

namespace nibble {
namespace device {

__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
/// Stores to the same shared variable of block `rank` of the cluster.
__device__ __forceinline__ void store_cluster(float* variable, int rank, float value) {
#if __CUDA_ARCH__ >= 900
  std::uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(shared_address(variable)), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
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

template <bool Clustered, bool NormedInput, int Hidden, int KeyHeads, int ValueHeads, int KeyDim,
          int ValueDim>
__global__ __launch_bounds__(
    Clustered ? device::delta_threads
              : device::delta_threads* ValueDim /
                    delta_columns) void delta_decode_kernel(const __grid_constant__ delta_rule_params p) {
  using namespace device;
  constexpr delta_shape shape{Hidden, KeyHeads, ValueHeads, KeyDim, ValueDim, 4};
  constexpr int splits = shape.splits(), groups = Clustered ? 1 : splits, channels = shape.channels();
  constexpr int roles = 2 * KeyDim / delta_threads;  // channels of q | k per thread: 1 or 2
  constexpr int runs = (Hidden + 1023) / 1024;
  __shared__ __align__(16) float qk[2 * KeyDim];
  __shared__ __align__(16) float partial[5][4];  // b, a, squares of role 0, of role 1, of x; by warp
  __shared__ float values[groups][delta_columns], outputs[groups][delta_columns];
  __shared__ float squares[splits];
  const int t = threadIdx.x % delta_threads, group = Clustered ? 0 : threadIdx.x / delta_threads;
  const int split = Clustered ? blockIdx.x : group;
  const int head = blockIdx.y, sequence = blockIdx.z, key_head = head / (ValueHeads / KeyHeads);
  const bool leads = group == 0;

  // Before the wait.
  const int slot = load_int(p.step.slot + sequence), position = load_int(p.step.position + sequence);
  const int row = load_int(p.step.first_row + sequence);
  const bool padding = position < 0;
  std::byte* const base = p.pool.slot(padding ? 0 : slot);
  float* const state = reinterpret_cast<float*>(base) +
                       static_cast<std::size_t>(head * splits + split) * (KeyDim * delta_columns);
  auto* const window = reinterpret_cast<__nv_bfloat16*>(base + shape.recurrent_bytes());
  uint4 wb[runs], wa[runs];
  float factor[NormedInput ? 1 : runs][8];
  if (leads) {
#pragma unroll
    for (int i = 0; i < runs; ++i) {
      const int k = 8 * t + 1024 * i;
      if (Hidden % 1024 == 0 || k < Hidden) {
        wb[i] = load_weights(p.ba + static_cast<std::size_t>(head) * Hidden + k);
        wa[i] = load_weights(p.ba + static_cast<std::size_t>(ValueHeads + head) * Hidden + k);
        if constexpr (!NormedInput) {
          const float4 f0 = load_float4(p.input_norm + k), f1 = load_float4(p.input_norm + k + 4);
          const float one = p.zero_centred ? 1.0f : 0.0f;
          factor[i][0] = one + f0.x, factor[i][1] = one + f0.y, factor[i][2] = one + f0.z;
          factor[i][3] = one + f0.w, factor[i][4] = one + f1.x, factor[i][5] = one + f1.y;
          factor[i][6] = one + f1.z, factor[i][7] = one + f1.w;
        }
      }
    }
  }
  delta_fragment<KeyDim> s;
  conv_channel tap[roles], v_tap;
  int channel[roles];
  const int v_channel = 2 * shape.key_width() + head * ValueDim + split * delta_columns + t;
#pragma unroll
  for (int i = 0; i < roles; ++i) {
    const int c = t + delta_threads * i;
    channel[i] = c < KeyDim ? key_head * KeyDim + c : shape.key_width() + key_head * KeyDim + c - KeyDim;
  }
  float norm = 0;
  if (!padding) {
    s.load(state, t);
    if (leads)
#pragma unroll
      for (int i = 0; i < roles; ++i) tap[i].load(p.conv, window, channels, channel[i], position);
    if (t < delta_columns) {
      v_tap.load(p.conv, window, channels, v_channel, position);
      norm = load_float(p.norm + split * delta_columns + t);
    }
  }
  const float rate = expf(load_float(p.a_log + head)), dt_bias = load_float(p.dt_bias + head);
  if constexpr (Clustered) cluster_arrive();

  wait_for_previous_grid();
  let_next_grid_start();
  __nv_bfloat16* const out =
      p.out + static_cast<std::size_t>(row) * p.ldo + head * ValueDim + split * delta_columns;
  if (padding) {
    if constexpr (Clustered) cluster_wait();
    if (t < delta_columns) out[t] = __float2bfloat16_rn(0.0f);
    return;
  }
  const __nv_bfloat16* const projected = p.qkvz + static_cast<std::size_t>(row) * p.ldqkvz;
  float z = 0, input[roles];
  uint4 x[runs];
  if (leads) {
#pragma unroll
    for (int i = 0; i < runs; ++i)
      if (Hidden % 1024 == 0 || 8 * t + 1024 * i < Hidden)
        x[i] = load_16(p.x + static_cast<std::size_t>(row) * p.ldx + 8 * t + 1024 * i);
#pragma unroll
    for (int i = 0; i < roles; ++i) input[i] = load_bf16(projected + channel[i]);
  }
  if (t < delta_columns) {
    const float v = load_bf16(projected + v_channel);
    z = load_bf16(projected + v_channel + shape.value_width());
    window[(position & 3) * channels + v_channel] = __float2bfloat16_rn(v);
    values[group][t] = v_tap(v);
  }
  if (leads) {
    float b = 0, a = 0, x_squares = 0, square[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < roles; ++i) {
      const float c = tap[i](input[i]);
      qk[t + delta_threads * i] = c;
      square[i] = __fmul_rn(c, c);
    }
#pragma unroll
    for (int i = 0; i < runs; ++i)
      if (Hidden % 1024 == 0 || 8 * t + 1024 * i < Hidden) {
        float xs[8], bs[8], as[8];
        unpack(xs, x[i]), unpack(bs, wb[i]), unpack(as, wa[i]);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if constexpr (!NormedInput) {
            x_squares = fmaf(xs[j], xs[j], x_squares);
            xs[j] *= factor[i][j];
          }
          b = fmaf(xs[j], bs[j], b), a = fmaf(xs[j], as[j], a);
        }
      }
    // Four sums over the warp at once: lane 0 ends with b, 1 with the squares of role 0, 2 with a, 3 with
    // those of role 1. Every sum is the tree of sum_lanes.
    const bool odd = t & 1, upper = t & 2;
    float c = odd ? square[0] : b, d = odd ? square[1] : a;
    c = __fadd_rn(c, __shfl_xor_sync(whole_warp, odd ? b : square[0], 1));
    d = __fadd_rn(d, __shfl_xor_sync(whole_warp, odd ? a : square[1], 1));
    c = __fadd_rn(upper ? d : c, __shfl_xor_sync(whole_warp, upper ? c : d, 2));
#pragma unroll
    for (int bit = 4; bit < 32; bit *= 2) c = __fadd_rn(c, __shfl_xor_sync(whole_warp, c, bit));
    const int lane = t & 31;
    if (lane < 4) partial[lane == 0 ? 0 : lane == 1 ? 2 : lane == 2 ? 1 : 3][t >> 5] = c;
    if constexpr (!NormedInput) {
      x_squares = sum_lanes(x_squares);
      if (lane == 0) partial[4][t >> 5] = x_squares;
    }
  }
  __syncthreads();

  const auto four = [](const float(&of)[4]) {
    const float4 w = *reinterpret_cast<const float4*>(of);
    return __fadd_rn(__fadd_rn(__fadd_rn(w.x, w.y), w.z), w.w);
  };
  float b = four(partial[0]), a = four(partial[1]);
  if constexpr (!NormedInput) {
    const float r = rsqrtf(four(partial[4]) * (1.0f / Hidden) + p.eps);
    b *= r, a *= r;
  }
  const delta_gates gates = gates_of(b, a, rate, dt_bias);
  float q_squares, k_squares;
  if constexpr (roles == 2) {
    q_squares = four(partial[2]), k_squares = four(partial[3]);
  } else {
    q_squares = __fadd_rn(partial[2][0], partial[2][1]), k_squares = __fadd_rn(partial[2][2], partial[2][3]);
  }
  const float q_factor = l2_factor(q_squares, query_scale<KeyDim>), k_factor = l2_factor(k_squares, 1.0f);
  constexpr int rows = delta_fragment<KeyDim>::rows;
  float k[rows], q[rows];
  load_key<KeyDim>(k, qk + KeyDim, t);
  load_key<KeyDim>(q, qk, t);
#pragma unroll
  for (int j = 0; j < rows; ++j) k[j] = __fmul_rn(k[j], k_factor), q[j] = __fmul_rn(q[j], q_factor);

  const int quad = t / 16, column = 4 * quad + owned_column(t);
  const float seen = sum_columns(s.dot(k));
  const float delta = delta_of(values[group][column], seen, gates.decay, gates.beta);
  s.decay(gates.decay);
  s.add(k, gather_columns(delta));
  s.store(state, t);
  const float o = sum_columns(s.dot(q));
  if ((t & 12) == 0) outputs[group][column] = o;
  if (leads && split == 0 && head % (ValueHeads / KeyHeads) == 0)
#pragma unroll
    for (int i = 0; i < roles; ++i)
      window[(position & 3) * channels + channel[i]] = __float2bfloat16_rn(input[i]);
  __syncthreads();
  if constexpr (Clustered) cluster_wait();  // every block of the cluster has begun: its memory may be written
  float own = 0;
  if (t < delta_columns) {
    own = outputs[group][t];
    const float sum = sum_lanes(__fmul_rn(own, own));
    if constexpr (Clustered) {
      if (t < splits) store_cluster(&squares[split], t, sum);
    } else {
      if (t == 0) squares[split] = sum;
    }
  }
  if constexpr (Clustered) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  if (t < delta_columns) {
    float all[splits];
#pragma unroll
    for (int i = 0; i < splits; ++i) all[i] = squares[i];
    out[t] = __float2bfloat16_rn(gated(own, gated_norm_factor<splits>(all, p.eps), norm, z));
  }
}

}  // namespace nibble
