// SPDX-License-Identifier: Apache-2.0
//
// MPI guarantees tags up to 32767. Calls that are near each other have distinct tags, so that a
// delayed message cannot be taken for one of a later call; headers carry the full numbers.
#pragma once

#include <cstdint>

namespace distmoe::mpi {

inline constexpr int kControlTag = 0;

struct CallTags {
  int header;
  int data;
};

constexpr CallTags tags_of(std::uint64_t communicator, std::uint64_t call) {
  constexpr std::uint64_t kCalls = 128;
  constexpr std::uint64_t kCommunicators = 127;
  const auto first = 2 + 2 * (communicator % kCommunicators * kCalls + call % kCalls);
  return {static_cast<int>(first), static_cast<int>(first + 1)};
}

static_assert(tags_of(126, 127).data <= 32767);

}  // namespace distmoe::mpi
