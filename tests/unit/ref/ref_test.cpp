// SPDX-License-Identifier: Apache-2.0
// The references against values worked out by hand.
#include <cmath>
#include <nibble/ref/activation.hpp>
#include <nibble/ref/attention.hpp>
#include <nibble/ref/conv.hpp>
#include <nibble/ref/delta_rule.hpp>
#include <nibble/ref/experts.hpp>
#include <nibble/ref/matrix.hpp>
#include <nibble/ref/norm.hpp>
#include <nibble/ref/rope.hpp>
#include <nibble/ref/router.hpp>
#include <nibble/ref/sampling.hpp>
#include <vector>

#include "support/catch.hpp"

namespace ref = nibble::ref;
using doubles = std::vector<double>;

namespace {

/// A row of 16 codes, all the same, under one scale byte.
ref::matrix row_of(unsigned code, std::uint8_t scale, float global, int rows = 1) {
  const std::vector<std::uint8_t> codes(static_cast<std::size_t>(8 * rows),
                                        static_cast<std::uint8_t>(code * 17)),
      scales(static_cast<std::size_t>(rows), scale);
  return ref::decode_nvfp4(codes, scales, global, rows, 16);
}

void check_close(const doubles& got, const doubles& expected, double tolerance = 1e-6) {
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    INFO("element " << i);
    CHECK(std::abs(got[i] - expected[i]) <= tolerance);
  }
}

}  // namespace

TEST_CASE("ref: NVFP4 products of the field reports") {
  const doubles ones(16, 1.0);
  CHECK(ref::linear(row_of(2, 0x38, 0.5f), ones, 1)[0] == 8.0);      // a multiplying global scale
  CHECK(ref::linear(row_of(2, 0x38, 1 / 2.0f), ones, 1)[0] == 8.0);  // an inverse one, inverted
  CHECK(ref::linear(row_of(2, 0x01, 1.0f), ones, 1)[0] == 0.03125);  // subnormal block scale
  CHECK(ref::linear(row_of(7, 0x01, 1e-5f), doubles(16, 1e4), 1)[0] == Approx(0.01875).epsilon(1e-6));
  CHECK(ref::linear(row_of(10, 0x7E, 1.0f), ones, 1)[0] == -7168.0);
}

TEST_CASE("ref: gate and up keep their own global scales, and their order") {
  const doubles x(16, 1.0 / 16);
  // The down projection passes the first intermediate value on.
  const std::vector<std::uint8_t> pick{0x02, 0, 0, 0, 0, 0, 0, 0};
  const ref::matrix down = ref::decode_nvfp4(pick, std::vector<std::uint8_t>{0x38}, 1.0f, 1, 16);
  const auto run = [&](const ref::matrix& gate, const ref::matrix& up) {
    return ref::swiglu({gate, up, down}, x, 1)[0];
  };
  CHECK(run(row_of(2, 0x38, 0.5f, 16), row_of(2, 0x38, 1.0f, 16)) == Approx(0.31123).epsilon(1e-4));
  CHECK(run(row_of(4, 0x38, 1.0f, 16), row_of(10, 0x38, 1.0f, 16)) == Approx(-1.76159).epsilon(1e-4));
}

TEST_CASE("ref: FP8 and bf16 products") {
  const std::vector<std::uint8_t> bytes{0x38, 0xC0, 0x01};  // 1, -2, 2^-9
  check_close(ref::linear(ref::decode_fp8(bytes, 0.5f, 1, 3), doubles{1, 1, 512}, 1), {0.0});
  const std::vector<std::uint16_t> words{0x3F80, 0xC000, 0x3F00, 0x4040};  // 1, -2, 0.5, 3
  check_close(ref::linear(ref::decode_bf16(words, 2, 2), doubles{1, 2, 4, 0}, 2), {-3, 6.5, 4, 2});
  check_close(ref::lm_head(ref::decode_bf16(words, 2, 2), doubles{1, 2}, 1), {-3, 6.5});
}

TEST_CASE("ref: activations") {
  CHECK(ref::sigmoid(0) == 0.5);
  CHECK(ref::silu(1) == Approx(0.7310585786));
  CHECK(ref::silu(-2) == Approx(-0.2384058440));
  CHECK(ref::softplus(0) == Approx(0.6931471806));
  CHECK(ref::softplus(25) == 25.0);
}

TEST_CASE("ref: norms") {
  // mean of squares of (3, 4) is 12.5
  check_close(ref::rms_norm(doubles{3, 4}, doubles{0, 1}, true, 0), {0.8485281, 2.2627417});
  check_close(ref::rms_norm(doubles{3, 4}, doubles{1, 2}, false, 0), {0.8485281, 2.2627417});
  check_close(ref::rms_norm(doubles{3, 4}, doubles{0, 0}, true, 12.5), {0.6, 0.8});
  check_close(ref::gated_rms_norm(doubles{3, 4}, doubles{1, -2}, doubles{1, 1}, 0), {0.6203238, -0.2697254});
  check_close(ref::l2_norm(doubles{3, 4, 0, 2}, 2, 0, 0.5), {0.3, 0.4, 0, 0.5});
  check_close(ref::l2_norm(doubles{0, 0}, 2, 1e-6, 1), {0, 0});
}

TEST_CASE("ref: rope turns the pairs (i, i + half) and leaves the rest") {
  const std::vector<int> positions{0, 2};
  // head_dim 6, rotary_dim 4, theta 100: frequencies 1 and 0.1
  const doubles x{1, 1, 0, 0, 5, 6, 1, 1, 0, 0, 5, 6};
  check_close(ref::rope(x, positions, 1, 6, 4, 100),
              {1, 1, 0, 0, 5, 6, std::cos(2.0), std::cos(0.2), std::sin(2.0), std::sin(0.2), 5, 6});
}

TEST_CASE("ref: attention is causal, grouped, and gated") {
  // Two queries of two heads on one KV head; keys 0 and ln 3 (dim 1), values 1 and 5.
  const doubles q{1, 0, 1, 0}, k{0, std::log(3.0)}, v{1, 5};
  // Row 0 sees one token; row 1, head 0: weights 1/4 and 3/4; head 1: equal weights.
  check_close(ref::attention(q, {}, k, v, {2, 1, 1}, 1.0), {1, 1, 4, 3});
  check_close(ref::attention(q, doubles{0, 0, 0, 1e3}, k, v, {2, 1, 1}, 1.0), {0.5, 0.5, 2, 3});
  // With history: one query behind three tokens, scale 0.
  check_close(ref::attention(doubles{7}, {}, doubles{1, 2, 3}, doubles{1, 2, 6}, {1, 1, 1}, 0.0), {3});
}

TEST_CASE("ref: conv keeps the last inputs") {
  doubles state{1, 2};  // one channel, width 3
  const doubles y = ref::causal_conv_silu(doubles{3, 4}, doubles{100, 10, 1}, 3, 1, state);
  check_close(y, {ref::silu(123.0), ref::silu(234.0)});
  check_close(state, {3, 4});
  doubles two{0, 0, 0, 0};  // two channels; a span shorter than the state
  check_close(ref::causal_conv_silu(doubles{1, 2}, doubles{1, 1, 1, 0, 0, -1}, 3, 2, two),
              {ref::silu(1), ref::silu(-2)});
  check_close(two, {0, 0, 1, 2});
}

TEST_CASE("ref: gated delta rule by hand") {
  // One head, k_dim 1, v_dim 1. S = 2, e^g = 1/2, k = 1, beta = 1/2, v = 3, q = 10:
  // S -> 1, delta = (3 - 1)/2 = 1, S -> 2, o = 20.
  doubles state{2};
  check_close(ref::delta_rule(doubles{10}, doubles{1}, doubles{3}, doubles{std::log(0.5)}, doubles{0.5},
                              {1, 1, 1, 1}, state),
              {20});
  check_close(state, {2});
  // Orthogonal keys do not disturb each other: what is stored under k1 is read back under it.
  doubles wide(4, 0.0);
  const doubles k{1, 0, 0, 1}, q{1, 0, 1, 0};
  check_close(ref::delta_rule(q, k, doubles{5, 6, 7, 8}, doubles{0, 0}, doubles{1, 1}, {1, 1, 2, 2}, wide),
              {5, 6, 5, 6});
  check_close(wide, {5, 6, 7, 8});
  // Two value heads on one key head.
  doubles heads(2, 0.0);
  check_close(ref::delta_rule(doubles{1}, doubles{1}, doubles{3, 4}, doubles{0, 0}, doubles{1, 0.5},
                              {1, 2, 1, 1}, heads),
              {3, 2});
  check_close(ref::delta_rule_log_decay(doubles{0}, doubles{std::log(2.0)}, doubles{0}),
              {-2 * std::log(2.0)});
}

TEST_CASE("ref: router") {
  const ref::routing r = ref::route(doubles{0, std::log(2.0), 0, std::log(4.0)}, 4, 3, true);
  CHECK(r.ids == std::vector<int>{3, 1, 0});  // the tie of 0 and 2 goes to the lower id
  check_close(r.weights, {4.0 / 7, 2.0 / 7, 1.0 / 7});
  check_close(ref::route(doubles{0, std::log(2.0), 0, std::log(4.0)}, 4, 2, false).weights, {0.5, 0.25});
}

TEST_CASE("ref: routed and shared experts") {
  const auto one = [](std::uint16_t bits) {
    return ref::decode_bf16(std::vector<std::uint16_t>{bits}, 1, 1);
  };
  const ref::expert doubling{one(0x3F80), one(0x3F80), one(0x4000)},
      zero{one(0x0000), one(0x3F80), one(0x3F80)};
  const std::vector<ref::expert> experts{zero, doubling};
  const double value = 2 * ref::silu(3.0) * 3.0;
  check_close(ref::routed_experts(experts, std::vector<int>{1, 0}, doubles{0.25, 0.75}, 2, doubles{3}, 1),
              {0.25 * value});
  check_close(ref::routed_experts(experts, std::vector<int>{-1, -1}, doubles{1, 1}, 2, doubles{3}, 1), {0});
  check_close(ref::shared_expert(doubling, one(0x0000), doubles{3}, 1), {0.5 * value});
}

TEST_CASE("ref: the largest logits") {
  using rows = std::vector<std::size_t>;
  const std::vector<float> l{1, -0.0f, 3, 0, 3, -INFINITY};
  CHECK(ref::largest_logits(l, 3) == rows{2, 4, 0});
  CHECK(ref::largest_logits(l, 5) == rows{2, 4, 0, 1, 3});
  CHECK(ref::largest_logits(l, 9) == rows{2, 4, 0, 1, 3, 5});
  CHECK(ref::largest_logits(std::vector<float>{1, NAN, 3, -NAN}, 3) == rows{1, 3, 2});
  CHECK(ref::largest_logits(std::vector<float>{}, 3).empty());
}

TEST_CASE("ref: sampling filters") {
  const doubles l{std::log(1.0), std::log(4.0), std::log(2.0), std::log(1.0)};
  check_close(ref::sampling_probabilities(l, 1, 0, 1, 0), {0.125, 0.5, 0.25, 0.125});
  check_close(ref::sampling_probabilities(l, 0, 0, 1, 0), {0, 1, 0, 0});
  check_close(ref::sampling_probabilities(l, 0.5, 0, 1, 0), {1.0 / 22, 16.0 / 22, 4.0 / 22, 1.0 / 22});
  check_close(ref::sampling_probabilities(l, 1, 3, 1, 0), {1.0 / 7, 4.0 / 7, 2.0 / 7, 0});
  check_close(ref::sampling_probabilities(l, 1, 0, 0.6, 0), {0, 2.0 / 3, 1.0 / 3, 0});
  check_close(ref::sampling_probabilities(l, 1, 0, 0, 0), {0, 1, 0, 0});
  check_close(ref::sampling_probabilities(l, 1, 0, 1, 0.4), {0, 2.0 / 3, 1.0 / 3, 0});
  check_close(ref::sampling_probabilities(l, 1, 0, 1, 1), {0, 1, 0, 0});
  check_close(ref::sampling_probabilities(doubles(4, 1.0), 1, 2, 1, 0), {0.5, 0.5, 0, 0});
}
