// SPDX-License-Identifier: Apache-2.0
//
// Windows that ranks of one process show each other. A kernel of a peer may write to a window after
// its owner closed: the owner gave up and the peer came late. So every rank that knows a window
// holds it, and the last one that lets go frees it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace distmoe::cuda {

/// The number under which ranks of this process find `windows`, while anybody holds them. Never 0.
std::uint64_t offer_windows(const std::shared_ptr<std::byte>& windows);

/// A share of the windows of that number; null where they are gone or never were.
std::shared_ptr<std::byte> claim_windows(std::uint64_t number);

}  // namespace distmoe::cuda
