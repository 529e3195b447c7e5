// SPDX-License-Identifier: Apache-2.0
//
// A 128-bit fingerprint of bytes. It lets a run compare all its repeats bit by bit without a second
// copy of the output, which would count as memory of the run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace distmoe::tools {

struct Digest {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  bool operator==(const Digest&) const = default;
};

/// Depends on every bit and on its position; not made to resist an attacker.
Digest digest_of(std::span<const std::byte> bytes);

}  // namespace distmoe::tools
