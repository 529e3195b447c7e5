// SPDX-License-Identifier: Apache-2.0
//
// Lets allocations fail, one at a time. Its source replaces operator new of the program that it is
// linked with, and of every library in it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace distmoe::testing {

/// Allocations until the one that fails; below 0 none does.
inline std::atomic<std::int64_t> countdown{-1};

using Act = std::function<void(const std::function<void()>&)>;

/// Calls `attempt` with every allocation of it failing once, the first, the second and so on, until
/// it needs fewer, and says how many there were. `attempt` starts from nothing, and calls `act`
/// around what is tried. Fails the test where that ends with anything but Error(out_of_memory).
std::int64_t num_errors(const char* what, const std::function<void(const Act&)>& attempt);

/// The same of what does allocate.
void expect_errors(const char* what, const std::function<void(const Act&)>& attempt);

}  // namespace distmoe::testing
