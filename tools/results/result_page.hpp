// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>

#include "results/result_file.hpp"

namespace distmoe::tools {

/// A whole HTML page, without scripts and without anything from elsewhere. `rows` is not empty.
std::string page_of(std::span<const ResultRow> rows);

}  // namespace distmoe::tools
