// SPDX-License-Identifier: Apache-2.0
//
// A configuration as ranks compare it: every field that must agree, as a number with a name.
#pragma once

#include <array>
#include <cstddef>
#include <string>

#include "distmoe/context.hpp"

namespace distmoe {

inline constexpr std::size_t kNumConfigFields = 28;

struct ConfigRecord {
  std::array<double, kNumConfigFields> values{};
};

/// NOTE: a double holds every legal size exactly (below 2^53); larger ones never get past
/// validate().
ConfigRecord record_config(const Config& config, const ContextOptions& options);

/// The first field in which two records differ, as "hidden_dim: 256 against 512"; empty if none.
std::string first_difference(const ConfigRecord& mine, const ConfigRecord& theirs);

}  // namespace distmoe
