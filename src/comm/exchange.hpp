// SPDX-License-Identifier: Apache-2.0
//
// What every engine does alike with the arguments and the clock of a collective call.
#pragma once

#include <chrono>
#include <cstddef>
#include <span>
#include <string>

namespace distmoe {

using SendSpans = std::span<const std::span<const std::byte>>;
using RecvSpans = std::span<const std::span<std::byte>>;

/// Throws invalid_argument where the spans of one rank's alltoallv cannot be right whatever the
/// peers say: a wrong number of entries, a null entry with a length, an own entry that differs.
void check_exchange(int rank, int size, SendSpans send, RecvSpans recv);

/// Copies this rank's own entry.
void copy_own_entry(int rank, SendSpans send, RecvSpans recv);

/// A negative timeout counts as zero, one beyond ten years as ten years: what adds it to a clock of
/// nanoseconds does not overflow.
std::chrono::milliseconds bounded(std::chrono::milliseconds timeout);
/// The bounded `timeout` from now.
std::chrono::steady_clock::time_point deadline_after(std::chrono::milliseconds timeout);

/// "rank 1", "ranks 1 and 3", "ranks 1, 2 and 3"; of more than eight the first ones and a count:
/// "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 1015 more".
std::string name_ranks(std::span<const int> ranks);

}  // namespace distmoe
