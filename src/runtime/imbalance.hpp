// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace distmoe {

/// Rows of the busiest (rank, expert) divided by the mean of all; empty without rows.
std::optional<double> imbalance_of(std::span<const std::int64_t> rows);

}  // namespace distmoe
