// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <unistd.h>

#include "app.hpp"

namespace {

// A descriptor that the caller closed would go to the next file or client opened here, and what is printed
// would end up there. Read-only, so that writing still fails and is noticed.
void occupy_standard_descriptors() {
  for (int descriptor = ::open("/dev/null", O_RDONLY); descriptor >= 0;
       descriptor = ::open("/dev/null", O_RDONLY))
    if (descriptor > 2) {
      ::close(descriptor);
      return;
    }
}

}  // namespace

int main(int argc, char** argv) {
  occupy_standard_descriptors();
  return qwen3_moe::run_command_line(argc, argv);
}
