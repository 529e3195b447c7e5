// SPDX-License-Identifier: Apache-2.0
//
// What `distmoe plan --json` prints. docs/memory-plan.md defines the keys.
#pragma once

#include <optional>
#include <string>

#include "distmoe/memory_plan.hpp"

namespace distmoe::tools {

/// One object, with the plan's numbers, its buffers and, where it was asked for, `budget`; ends
/// with a newline.
std::string json_of(const MemoryPlan& plan, const std::optional<BudgetReport>& budget);

}  // namespace distmoe::tools
