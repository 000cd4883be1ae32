// SPDX-License-Identifier: Apache-2.0
// 210 odd geometries in three translation units, ODD_PART 0…2: small and ragged N and K, one to four
// segments, every format, epilogue and column class.
#include <utility>

#include "gemv_check.cuh"

using namespace nibble;

namespace {

constexpr int per_part = 70;

constexpr int mix(int i, int salt, int range) {
  std::uint64_t z = static_cast<std::uint64_t>(i) * 0x9E37'79B9'7F4A'7C15ull +
                    static_cast<std::uint64_t>(salt) * 0xD1B5'4A32'D192'ED03ull;
  z = (z ^ (z >> 30)) * 0xBF58'476D'1CE4'E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D0'49BB'1331'11EBull;
  return static_cast<int>((z ^ (z >> 31)) % static_cast<std::uint64_t>(range));
}

constexpr int odd_n[] = {1, 2, 7, 15, 16, 17, 31, 32, 33, 257, 100, 48, 640, 1023, 528, 2080};
constexpr int odd_k[] = {16, 32, 48, 464, 2880, 128, 256, 112, 144, 1024, 2048, 2032, 512, 1536, 4096, 5120};

constexpr resident_layout odd_layout(int i) {
  const weight_format format = i % 5 < 3    ? weight_format::nvfp4
                               : i % 5 == 3 ? weight_format::fp8
                                            : weight_format::bf16;
  const int n = odd_n[i < 80 ? i % 16 : mix(i, 1, 16)],
            k = odd_k[i < 80 ? (i / 16 * 3 + i) % 16 : mix(i, 2, 16)];
  switch (i % 7) {
    case 1:
      return {fused(k, format, n, 1 + mix(i, 3, 40))};
    case 3:
      return {fused(k, format, n, 3, 16, 1 + mix(i, 4, 20))};
    case 5:
      return {fused(k, format, n, n), row_order::gate_up};
    default:
      return {matrix(n, k, format)};
  }
}

template <int I>
void one() {
  constexpr resident_layout layout = odd_layout(I);
  constexpr int columns = 1 << (I / 7 % 5);
  constexpr gemv_policy policy = select_gemv(layout, columns);
  device_test::current() = "odd: " + layout.shape.name();
  if constexpr (layout.order == row_order::gate_up)
    device_test::check_policy<layout, policy, swiglu>(I);
  else if constexpr (I % 7 == 2)
    device_test::check_policy<layout, policy, add_residual>(I);
  else if constexpr (I % 7 == 4)
    device_test::check_policy<layout, policy, store_and_argmax>(I);
  else if constexpr (I % 7 == 0)
    device_test::check_policy<layout, policy, store<float>>(I);
  else
    device_test::check_policy<layout, policy, store<__nv_bfloat16>>(I);
}

template <int... I>
void all(std::integer_sequence<int, I...>) {
  (one<ODD_PART * per_part + I>(), ...);
}

const bool registered =
    device_test::add("odd", "70 geometries", [] { all(std::make_integer_sequence<int, per_part>{}); });

}  // namespace

int main(int argc, char** argv) { return device_test::run(argc, argv); }
