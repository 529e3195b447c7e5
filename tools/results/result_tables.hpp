// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>

#include "results/result_file.hpp"

namespace distmoe::tools {

/// What pages of the documentation have of results: machines with their rates, commands and dates,
/// then one table of all rows. Markdown; ends with a newline.
std::string markdown_of(std::span<const ResultRow> rows);

}  // namespace distmoe::tools
