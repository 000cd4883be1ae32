// SPDX-License-Identifier: Apache-2.0
// Bytes of a file → the header parser; what it accepts is read to the end.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "nibble/io/safetensors.hpp"

namespace {

/// A file in memory with these bytes, open for the whole run; returns its path.
const std::string& scratch_file(const std::uint8_t* data, std::size_t size) {
  static const int descriptor = ::memfd_create("nibble-fuzz", MFD_CLOEXEC);
  static const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
  if (descriptor < 0 || ::ftruncate(descriptor, 0) != 0 ||
      ::pwrite(descriptor, data, size, 0) != static_cast<ssize_t>(size))
    std::abort();
  return path;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const nibble::io::safetensors_file file(scratch_file(data, size));
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
