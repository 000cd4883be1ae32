// SPDX-License-Identifier: Apache-2.0
// Bytes of a file → the header parser; what it accepts is read to the end.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "nibble/io/safetensors.hpp"

namespace {

/// One file for the whole run, rewritten for each input.
const std::string& scratch_path() {
  static const std::string path = [] {
    std::string name = (std::filesystem::temp_directory_path() / "nibble-fuzz-XXXXXX").string();
    const int descriptor = ::mkstemp(name.data());
    if (descriptor < 0) std::abort();
    ::close(descriptor);
    std::atexit([] { std::filesystem::remove(scratch_path()); });
    return name;
  }();
  return path;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (std::FILE* file = std::fopen(scratch_path().c_str(), "wb")) {
    std::fwrite(data, 1, size, file);
    std::fclose(file);
  }
  try {
    const nibble::io::safetensors_file file(scratch_path());
    std::uint64_t total = 0;
    for (const auto& [name, tensor] : file.tensors()) {
      std::vector<std::byte> bytes(tensor.bytes);
      file.read(tensor, 0, bytes);
      total += tensor.bytes;
    }
    if (total > size) std::abort();  // tensors cannot hold more than the file
  } catch (const nibble::format_error&) {
  }
  return 0;
}
