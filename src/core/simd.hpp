// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

/// Compiles a function once per vector extension and picks at load time. The clones agree bit by
/// bit: contraction to FMA is off and every loop is elementwise.
// NOTE: sanitizers instrument the resolver of a clone, which runs before their own start-up.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(DISTMOE_SANITIZED)
#define DISTMOE_SIMD_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define DISTMOE_SIMD_CLONES
#endif

namespace distmoe {

/// Asks for the cache lines of memory that is read soon, where the processor's own prefetcher does
/// not see the order.
inline void prefetch(const void* begin, std::int64_t num_bytes) {
  constexpr std::int64_t kCacheLine = 64;
  const auto* bytes = static_cast<const std::byte*>(begin);
  for (std::int64_t at = 0; at < num_bytes; at += kCacheLine) __builtin_prefetch(bytes + at);
}

}  // namespace distmoe
