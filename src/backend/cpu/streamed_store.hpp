// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace distmoe::cpu {

/// Copies like memcpy, but whole cache lines go to memory without being read first and without
/// taking a place in the caches: for results that are larger than these and that the call does not
/// read again. What this thread stored so is in order for others after finish_streamed_stores().
void store_streamed(const void* from, void* to, std::size_t num_bytes);

void finish_streamed_stores();

}  // namespace distmoe::cpu
