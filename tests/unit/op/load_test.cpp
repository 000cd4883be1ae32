// SPDX-License-Identifier: Apache-2.0
#include "nibble/op/load.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "nibble/core/bf16.hpp"
#include "support/catch.hpp"
#include "support/safetensors_writer.hpp"
#include "support/temporary_folder.hpp"

using namespace nibble;
using namespace nibble::test;
using io::dtype;

namespace {

/// An op with one matrix of each format and a parameter.
struct small {
  linear<fused(16, weight_format::nvfp4, 2, 1), "gate_proj", "up_proj"> gate_up;
  linear<matrix(3, 16, weight_format::fp8), "q_proj"> q;
  linear<matrix(2, 5, weight_format::bf16), "router"> router;
  parameter<"bias", 4> bias;
  using op_members =
      members<part<&small::gate_up>, part<&small::q>, part<&small::router>, part<&small::bias>>;
};

/// Writes the tensors of `small`, each replaceable or removable.
struct small_checkpoint {
  struct tensor {
    dtype type;
    io::tensor_shape shape;
    std::string bytes;
  };
  std::map<std::string, tensor> tensors;

  static std::string floats(std::vector<float> values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * 4};
  }
  static std::string bf16s(const std::vector<float>& values) {
    std::string out;
    for (const float value : values) {
      const std::uint16_t bits = bf16::encode(value);
      out.append(reinterpret_cast<const char*>(&bits), 2);
    }
    return out;
  }

  small_checkpoint() {
    for (const auto& [part, rows] : {std::pair{"gate_proj", 2u}, {"up_proj", 1u}}) {
      const std::string name = part;
      tensors[name + ".weight"] = {
          dtype::u8, {rows, 8}, std::string(rows * 8, name == "gate_proj" ? '\x22' : '\x44')};
      tensors[name + ".weight_scale"] = {dtype::f8_e4m3, {rows, 1}, std::string(rows, '\x38')};
    }
    tensors["gate_proj.weight_scale_2"] = {dtype::f32, {}, floats({0.5f})};
    tensors["up_proj.weight_scale_2"] = {dtype::f32, {1}, floats({0.25f})};
    tensors["q_proj.weight"] = {dtype::f8_e4m3, {3, 16}, std::string(48, '\x38')};
    tensors["q_proj.weight_scale"] = {dtype::bf16, {}, bf16s({2.0f})};
    tensors["q_proj.input_scale"] = {dtype::f32, {}, floats({9.0f})};
    tensors["router.weight"] = {dtype::bf16, {2, 5}, bf16s({1, 2, 3, 4, 5, 6, 7, 8, 9, 10})};
    tensors["bias"] = {dtype::bf16, {4}, bf16s({1, -2, 0.5f, 3})};
  }
  void write(const temporary_folder& folder, const std::string& odd_prefix = "") const {
    safetensors_writer writer;
    // A first tensor of odd size puts every other one on an odd address.
    if (!odd_prefix.empty()) writer.add("input_scale", dtype::u8, {odd_prefix.size()}, odd_prefix);
    for (const auto& [name, t] : tensors) writer.add(name, t.type, t.shape, t.bytes);
    writer.write(folder.path() / "model.safetensors");
  }
  /// The complaint on loading, "" when it loads.
  [[nodiscard]] std::string complaint(bind_options options = modelopt()) const {
    const temporary_folder folder;
    write(folder);
    return message_of<format_error>([&] {
      io::checkpoint source(folder.path());
      small op;
      (void)load_weights(op, source, options);
    });
  }
  static bind_options modelopt() {
    bind_options options;
    options.method = quantization_method::modelopt;
    options.skip = [](std::string_view name) { return name == "input_scale"; };
    return options;
  }
};

}  // namespace

TEST_CASE("a checkpoint is loaded into the tree") {
  const temporary_folder folder;
  small_checkpoint().write(folder);
  for (const load_mode mode : {load_mode::copy, load_mode::map}) {
    io::checkpoint source(folder.path());
    small op;
    const loaded_weights weights = load_weights(op, source, small_checkpoint::modelopt(), mode);
    CHECK(op.gate_up.segments[0].global_scale == 0.5f);
    CHECK(op.gate_up.segments[1].global_scale == 0.25f);
    CHECK(op.gate_up.segments[0].weight[15] == std::byte{0x22});
    CHECK(op.gate_up.segments[1].weight[7] == std::byte{0x44});
    CHECK(op.gate_up.segments[0].block_scale[1] == std::byte{0x38});
    CHECK(op.q.segments[0].global_scale == 2.0f);
    CHECK(op.q.segments[0].weight[47] == std::byte{0x38});
    std::uint16_t last = 0;
    std::memcpy(&last, op.router.segments[0].weight + 18, 2);
    CHECK(bf16::decode(last) == 10.0f);
    CHECK(std::vector<float>(op.bias.data, op.bias.data + 4) == std::vector<float>{1, -2, 0.5f, 3});
    if (mode == load_mode::copy) CHECK(weights.copied_bytes == 16 + 2 + 8 + 1 + 48 + 20 + 8);
    if (mode == load_mode::map) CHECK(weights.copied_bytes == 8);
  }
}

TEST_CASE("C038: tensors at odd addresses are copied to aligned memory") {
  const temporary_folder folder;
  small_checkpoint().write(folder, "odd");
  io::checkpoint source(folder.path());
  small op;
  const auto weights = load_weights(op, source, small_checkpoint::modelopt());
  CHECK(reinterpret_cast<std::uintptr_t>(op.q.segments[0].weight) % host_arena::alignment_bytes == 0);
  CHECK(reinterpret_cast<std::uintptr_t>(op.bias.data) % host_arena::alignment_bytes == 0);
  CHECK(op.bias.data[3] == 3.0f);
  CHECK(op.q.segments[0].weight[0] == std::byte{0x38});
}

TEST_CASE("C001: compressed-tensors stores the inverse, decided by name and method") {
  small_checkpoint c;
  for (const std::string part : {"gate_proj", "up_proj"}) {
    c.tensors[part + ".weight_packed"] = c.tensors[part + ".weight"];
    c.tensors.erase(part + ".weight");
    c.tensors.erase(part + ".weight_scale_2");
    c.tensors[part + ".weight_global_scale"] = {
        dtype::f32, {1}, small_checkpoint::floats({part == "gate_proj" ? 2.0f : 3584.0f})};
    c.tensors[part + ".input_global_scale"] = {dtype::f32, {1}, small_checkpoint::floats({37.5f})};
  }
  bind_options options = small_checkpoint::modelopt();
  CHECK(has(c.complaint(options),
            "gate_proj is named as compressed-tensors does, but the configuration says modelopt"));
  for (const auto method : {quantization_method::compressed_tensors, quantization_method::none}) {
    options.method = method;
    const temporary_folder folder;
    c.write(folder);
    io::checkpoint source(folder.path());
    small op;
    const auto weights = load_weights(op, source, options);
    CHECK(op.gate_up.segments[0].global_scale == 0.5f);
    CHECK(op.gate_up.segments[1].global_scale == 1.0f / 3584.0f);
  }
  options.method = quantization_method::compressed_tensors;
  CHECK(has(small_checkpoint().complaint(options), "gate_proj is named as modelopt does"));
}

TEST_CASE("everything that is wrong is reported at once") {
  small_checkpoint c;
  c.tensors.erase("router.weight");
  c.tensors["q_proj.weight"].shape = {16, 3};
  c.tensors["bias"] = {dtype::i32, {4}, std::string(16, '\0')};
  c.tensors["surprise"] = {dtype::u8, {1}, "x"};
  c.tensors["up_proj.weight_scale_2"].bytes = small_checkpoint::floats({-1.0f});
  const std::string complaint = c.complaint();
  CHECK(has(complaint, "1 missing: router.weight"));
  CHECK(has(complaint, "1 unexpected: surprise"));
  CHECK(has(complaint, "1 of the wrong shape: q_proj.weight is [16, 3], expected [3, 16]"));
  CHECK(has(complaint, "1 of the wrong type: bias is I32, expected BF16 or F32"));
  CHECK(has(complaint, "1 with a bad value: up_proj.weight_scale_2"));
}

TEST_CASE("C037, C052: scales of another shape are refused by name") {
  small_checkpoint c;
  for (const io::tensor_shape& shape : {io::tensor_shape{3, 1}, {2, 2}, {2, 0}, {1, 2}}) {
    std::uint64_t elements = 1;
    for (const auto size : shape) elements *= size;
    c.tensors["gate_proj.weight_scale"] = {dtype::f8_e4m3, shape, std::string(elements, '\x38')};
    CHECK((c.complaint() == "") == (shape == io::tensor_shape{2, 1}));
    CHECK(has(c.complaint(), "gate_proj.weight_scale"));
  }
  c = {};
  for (const io::tensor_shape& shape : {io::tensor_shape{3, 1}, {1, 1}, {2}, {1, 1, 1}}) {
    std::uint64_t elements = 1;
    for (const auto size : shape) elements *= size;
    c.tensors["q_proj.weight_scale"] = {dtype::f32, shape, std::string(elements * 4, '\x3f')};
    CHECK(has(c.complaint(), "q_proj.weight_scale is " + io::to_string(shape) + ", expected [] or [1]"));
  }
}

TEST_CASE("C046: scalars may be [] or [1], F32 or BF16") {
  for (const bool vector : {false, true})
    for (const bool narrow : {false, true}) {
      small_checkpoint c;
      c.tensors["gate_proj.weight_scale_2"] = {
          narrow ? dtype::bf16 : dtype::f32, vector ? io::tensor_shape{1} : io::tensor_shape{},
          narrow ? small_checkpoint::bf16s({0.5f}) : small_checkpoint::floats({0.5f})};
      CHECK(c.complaint() == "");
    }
}

TEST_CASE("C051: a scale is there, finite and above zero") {
  for (const char* name : {"gate_proj.weight_scale_2", "gate_proj.weight_scale", "q_proj.weight_scale"}) {
    small_checkpoint c;
    c.tensors.erase(name);
    CHECK(has(c.complaint(), std::string("missing: ") + name));
  }
  for (const float bad : {0.0f, -1.0f, std::nanf(""), HUGE_VALF, std::numeric_limits<float>::denorm_min()}) {
    small_checkpoint c;
    c.tensors["gate_proj.weight_scale_2"].bytes = small_checkpoint::floats({bad});
    CHECK(has(c.complaint(), "gate_proj.weight_scale_2"));
  }
}

TEST_CASE("C006: NaN and negative block scales are refused with name and index") {
  for (const auto& [byte, fine] : {std::pair{0x7E, true},
                                   {0x00, true},
                                   {0x01, true},
                                   {0x80, true},
                                   {0x7F, false},
                                   {0xFF, false},
                                   {0xB8, false},
                                   {0x81, false}}) {
    small_checkpoint c;
    c.tensors["gate_proj.weight_scale"].bytes[1] = static_cast<char>(byte);
    for (const load_mode mode : {load_mode::copy, load_mode::map}) {
      const temporary_folder folder;
      c.write(folder);
      const std::string complaint = message_of<format_error>([&] {
        io::checkpoint source(folder.path());
        small op;
        (void)load_weights(op, source, small_checkpoint::modelopt(), mode);
      });
      CHECK((complaint == "") == fine);
      if (!fine) CHECK(has(complaint, "gate_proj.weight_scale has"));
      if (!fine) CHECK(has(complaint, "at index 1"));
    }
  }
  small_checkpoint c;
  c.tensors["q_proj.weight"].bytes[5] = '\xB8';  // weights have signs
  CHECK(c.complaint() == "");
  c.tensors["q_proj.weight"].bytes[5] = '\xFF';
  CHECK(has(c.complaint(), "q_proj.weight has NaN (byte 255) at index 5"));
}

TEST_CASE("tensors that stay in the mapping may be checked later, the others are not put off") {
  const parallel_runner serial = [](std::size_t count, const auto& body) {
    for (std::size_t i = 0; i < count; ++i) body(i);
  };
  const check_later gates = [](const io::tensor_slice& slice) {
    return slice.name.find("gate_proj") != std::string::npos;
  };
  small_checkpoint c;
  c.tensors["gate_proj.weight_scale"].bytes[1] = '\x7F';
  const temporary_folder folder;
  c.write(folder);
  {
    io::checkpoint source(folder.path());
    small op;
    const auto weights =
        load_weights(op, source, small_checkpoint::modelopt(), load_mode::map, serial, gates);
    CHECK(!weights.unchecked.empty());
    CHECK(
        has(message_of<format_error>([&] { weights.check_the_rest(serial); }), "gate_proj.weight_scale has"));
  }
  io::checkpoint source(folder.path());
  small op;
  // What is copied is checked on the way, and what nobody put off at once.
  CHECK(has(message_of<format_error>([&] {
              (void)load_weights(op, source, small_checkpoint::modelopt(), load_mode::copy, serial, gates);
            }),
            "gate_proj.weight_scale has"));
  c.tensors["gate_proj.weight_scale"].bytes[1] = '\x00';
  c.tensors["up_proj.weight_scale"].bytes[0] = '\x7F';
  const temporary_folder other;
  c.write(other);
  io::checkpoint damaged(other.path());
  CHECK(has(message_of<format_error>([&] {
              (void)load_weights(op, damaged, small_checkpoint::modelopt(), load_mode::map, serial, gates);
            }),
            "up_proj.weight_scale has"));
}

TEST_CASE("values that are not finite are refused with name and index") {
  const float nan = std::nanf(""), inf = HUGE_VALF, most = 3e38f;
  for (const load_mode mode : {load_mode::copy, load_mode::map}) {
    const auto complaint = [&](const char* name, std::string bytes, dtype type) {
      small_checkpoint c;
      c.tensors[name].type = type;
      c.tensors[name].bytes = std::move(bytes);
      const temporary_folder folder;
      c.write(folder);
      return message_of<format_error>([&] {
        io::checkpoint source(folder.path());
        small op;
        (void)load_weights(op, source, small_checkpoint::modelopt(), mode);
      });
    };
    for (const float bad : {nan, -nan, inf, -inf}) {
      CHECK(has(
          complaint("router.weight", small_checkpoint::bf16s({1, 2, 3, 4, 5, 6, 7, bad, 9, 10}), dtype::bf16),
          "router.weight has a value that is not finite at index 7"));
      CHECK(has(complaint("bias", small_checkpoint::floats({1, most, bad, 4}), dtype::f32),
                "bias has a value that is not finite at index 2"));
      CHECK(has(complaint("bias", small_checkpoint::bf16s({1, 2, 3, bad}), dtype::bf16),
                "bias has a value that is not finite at index 3"));
    }
    CHECK(complaint("bias", small_checkpoint::floats({-most, most, 1e-45f, -0.0f}), dtype::f32) == "");
  }
}

TEST_CASE("C045, C048: stored and declared formats must not be two quantised ones") {
  bind_options options = small_checkpoint::modelopt();
  options.declared_format = [](std::string_view module) -> std::optional<weight_format> {
    if (module == "q_proj") return weight_format::nvfp4;
    return weight_format::bf16;
  };
  CHECK(has(small_checkpoint().complaint(options), "q_proj is stored as fp8, the configuration says nvfp4"));
  options.declared_format = [](std::string_view) { return std::optional(weight_format::bf16); };
  CHECK(small_checkpoint().complaint(options) == "");
  small_checkpoint c;  // packed bytes without scales are never used
  c.tensors.erase("up_proj.weight_scale");
  c.tensors.erase("up_proj.weight_scale_2");
  CHECK(has(c.complaint(), "2 missing: up_proj.weight_scale, up_proj.weight_scale_2"));
  c = {};  // bf16 where packed bytes are expected
  c.tensors["up_proj.weight"] = {dtype::bf16, {1, 16}, std::string(32, '\0')};
  CHECK(has(c.complaint(), "up_proj.weight is BF16, expected U8"));
}

TEST_CASE("C012: unused activation scales change nothing") {
  small_checkpoint c;
  CHECK(c.complaint() == "");
  c.tensors["gate_proj.input_scale"] = {dtype::f32, {}, small_checkpoint::floats({std::nanf("")})};
  c.tensors["q_proj.k_scale"] = {dtype::f32, {}, small_checkpoint::floats({1.0f})};
  CHECK(c.complaint() == "");
}

TEST_CASE("loading runs on any number of threads the caller brings") {
  const temporary_folder folder;
  small_checkpoint().write(folder);
  io::checkpoint source(folder.path());
  small op;
  std::vector<std::size_t> done;
  const auto weights = load_weights(op, source, small_checkpoint::modelopt(), load_mode::copy,
                                    [&](std::size_t count, const std::function<void(std::size_t)>& body) {
                                      for (std::size_t i = count; i-- > 0;) body(i), done.push_back(i);
                                    });
  CHECK(done.size() == 7);
  CHECK(op.bias.data[1] == -2.0f);
}

TEST_CASE("an arena hands out aligned pieces until it is full") {
  host_arena arena(1024);
  const auto a = arena.allocate(1);
  const auto b = arena.allocate(100);
  CHECK(b.data() - a.data() == 64);
  CHECK(arena.used_bytes() == 164);
  CHECK(has(message_of<out_of_memory>([&] { (void)arena.allocate(1000); }), "860 of 1024 are left"));
  CHECK(arena.allocate(832).size() == 832);
  CHECK(message_of<out_of_memory>([&] { (void)arena.allocate(1); }) != "");
}
