// SPDX-License-Identifier: Apache-2.0
//
// Strict readers of option values: the whole text must be one legal value. Each throws
// invalid_argument naming the option, the text and what is legal.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace distmoe::tools {

/// A decimal integer in [low, high].
std::int64_t parse_integer(std::string_view option, std::string_view text, std::int64_t low,
                           std::int64_t high);

enum class Zero { kLegal, kIllegal };

/// A finite decimal number that is positive, or zero where `zero` says so.
double parse_real(std::string_view option, std::string_view text, Zero zero);

/// A finite decimal number.
double parse_finite(std::string_view option, std::string_view text);

/// A path that is not empty.
std::filesystem::path parse_path(std::string_view option, std::string_view text);

/// Token counts "N0,N1,..." of 1..max_entries ranks, each >= 0, whose sum fits in 64 bits.
std::vector<std::int64_t> parse_token_counts(std::string_view option, std::string_view text,
                                             int max_entries);

/// The index of `text` in `names`.
int parse_name(std::string_view option, std::string_view text,
               const std::vector<std::string_view>& names);

}  // namespace distmoe::tools
