// SPDX-License-Identifier: Apache-2.0
/// \file
/// Counters in Prometheus' text format.
#pragma once

#include <string>

#include "engine/counters.hpp"

namespace qwen3_moe {

std::string metrics_text(const engine_counters& counters);

}  // namespace qwen3_moe
