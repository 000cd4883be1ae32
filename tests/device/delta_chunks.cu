// SPDX-License-Identifier: Apache-2.0
// Prefill of the delta rule in chunks, against fp64: pieces that begin and end anywhere, hard gates and keys,
// long prompts, cuts at whole chunks.
#include "delta_layer.cuh"

using namespace delta_test;

namespace {

constexpr delta_shape wide_values{256, 1, 1, 64, 256, 4};

/// Continues after each of many positions with a piece of chunks, each sequence beside the others.
template <delta_shape S>
void any_position(std::uint64_t seed) {
  prefill_sequences<S>(seed, {63, 64, 65, 127, 1, 130, 0, 200}, content::plain, 3);
}

const bool added[] = {
    device_test::add("small", "one chunk, and more",
                     [] {
                       prefill_sequences<tiny>(1, {64, 128, 100});
                       prefill_sequences<narrow>(2, {129, 64});
                     }),
    device_test::add("small", "hard gates, keys and values",
                     [] {
                       prefill_sequences<tiny>(3, {200, 64, 70}, content::hard);
                     }),
    device_test::add("chunks", "after any position",
                     [] {
                       any_position<tiny>(10);
                       any_position<odd>(11);
                     }),
    device_test::add("chunks", "full width",
                     [] {
                       prefill_sequences<full>(12, {150, 3, 97});
                     }),
    device_test::add("chunks", "256 value dimensions, one key head",
                     [] {
                       prefill_sequences<wide_values>(13, {70, 130});
                     }),
    device_test::add("chunks", "hard gates, keys and values",
                     [] {
                       prefill_sequences<odd>(14, {130, 320, 65}, content::hard);
                       prefill_sequences<full>(15, {64, 129}, content::hard);
                     }),
    device_test::add("chunks", "long prompts",
                     [] {
                       prefill_sequences<tiny>(16, {1500, 1029});
                       prefill_sequences<narrow>(17, {1100}, content::hard, 1);
                       prefill_sequences<narrow>(18, {4096}, content::plain, 1);
                     }),
    device_test::add("chunks", "cuts at whole chunks",
                     [] {
                       cuts<tiny>(20, 300, {{300}, {64, 236}, {128, 128, 44}, {192, 64, 30, 14}}, false);
                       cuts<odd>(21, 200, {{200}, {64, 64, 72}, {128, 72}}, false);
                       cuts<full>(22, 170, {{170}, {64, 106}, {128, 42}}, false);
                     }),
    device_test::add("chunks", "a step of many sequences",
                     [] {
                       // More than a warp of them, found by later rounds of the search.
                       prefill_sequences<narrow>(23, std::vector<int>(40, 70));
                     }),
};

}  // namespace

int main(int argc, char** argv) { return added[0] ? device_test::run(argc, argv) : 1; }
