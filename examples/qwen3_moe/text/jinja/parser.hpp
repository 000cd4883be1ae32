// SPDX-License-Identifier: Apache-2.0
/// \file
/// Tokens to a syntax tree.
#pragma once

#include <cstddef>
#include <string_view>

#include "ast.hpp"

namespace qwen3_moe::jinja {

/// Throws template_error (syntax) with line and column for anything outside the supported part of Jinja, and
/// where expressions or blocks nest deeper than `deepest`.
syntax_tree parse(const template_source& source, std::size_t deepest);

/// The filters and tests that exist; nullptr for other names.
filter_function find_filter(std::string_view name);
test_function find_test(std::string_view name);

}  // namespace qwen3_moe::jinja
