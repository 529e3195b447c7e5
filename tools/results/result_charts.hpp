// SPDX-License-Identifier: Apache-2.0
//
// The sections of the page that draw charts: each empty where no row has what it shows, and
// its cards of at most so many bytes.
#pragma once

#include <cstddef>
#include <string>

#include "results/result_groups.hpp"

namespace distmoe::tools {

/// A chart a shape: rates beside what dense products and memory of the same run allow.
std::string roofline_section(const ResultGroup& rows, std::size_t most_bytes);
/// Rate over the tokens of a rank.
std::string tokens_section(const ResultGroup& rows, std::size_t most_bytes);
/// Tokens per second of all ranks over the number of ranks.
std::string ranks_section(const ResultGroup& rows, std::size_t most_bytes);

}  // namespace distmoe::tools
