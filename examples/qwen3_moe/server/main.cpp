// SPDX-License-Identifier: Apache-2.0
#include "app.hpp"

int main(int argc, char** argv) { return qwen3_moe::run_command_line(argc, argv); }
