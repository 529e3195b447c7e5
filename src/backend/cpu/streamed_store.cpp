// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/streamed_store.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace distmoe::cpu {

#if defined(__SSE2__)

void store_streamed(const void* from, void* to, std::size_t num_bytes) {
  constexpr std::size_t kLine = 64;
  const auto* source = static_cast<const std::byte*>(from);
  auto* target = static_cast<std::byte*>(to);
  // Lines that are shared with a neighbour go through the caches: a part of one costs more.
  const std::size_t offset = reinterpret_cast<std::uintptr_t>(to) % kLine;
  const std::size_t head = std::min(num_bytes, offset == 0 ? 0 : kLine - offset);
  std::memcpy(target, source, head);
  const std::size_t end = head + (num_bytes - head) / kLine * kLine;
  for (std::size_t at = head; at < end; at += sizeof(__m128i)) {
    const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at));
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + at), value);
  }
  std::memcpy(target + end, source + end, num_bytes - end);
}

void finish_streamed_stores() { _mm_sfence(); }

#else

void store_streamed(const void* from, void* to, std::size_t num_bytes) {
  std::memcpy(to, from, num_bytes);
}

void finish_streamed_stores() {}

#endif

}  // namespace distmoe::cpu
