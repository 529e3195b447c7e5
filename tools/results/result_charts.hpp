// SPDX-License-Identifier: Apache-2.0
//
// The sections of the page that draw charts: each empty where no row has what it shows.
#pragma once

#include <string>

#include "results/result_groups.hpp"

namespace distmoe::tools {

/// A chart a shape: rates beside what dense products and memory of the same run allow.
std::string roofline_section(const ResultGroup& rows);
/// Rate over the tokens of a rank.
std::string tokens_section(const ResultGroup& rows);
/// Tokens per second of all ranks over the number of ranks.
std::string ranks_section(const ResultGroup& rows);

}  // namespace distmoe::tools
