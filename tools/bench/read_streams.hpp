// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace distmoe::tools {

/// Reads `num_bytes`, all but what is left of them after whole cache lines of eight equal parts,
/// which it walks side by side: one thread reads faster so than from one end to the other, because
/// the processor's prefetchers follow several streams. Returns the exclusive or of all words.
std::uint64_t read_streams(const std::byte* data, std::size_t num_bytes);

}  // namespace distmoe::tools
