// SPDX-License-Identifier: Apache-2.0
//
// Invariant: exactly the bytes that are named are written, wherever they begin and end in a line.
#include "backend/cpu/streamed_store.hpp"

#include <gtest/gtest.h>

#include <cstring>

namespace distmoe::cpu {
namespace {

constexpr std::size_t kLine = 64;

TEST(StreamedStore, WritesTheBytesOfEveryPlaceAndLengthAndNoOther) {
  alignas(kLine) std::byte target[6 * kLine];
  std::byte source[6 * kLine];
  for (std::size_t i = 0; i < sizeof(source); ++i) source[i] = static_cast<std::byte>(i * 37 + 11);
  for (std::size_t from = 0; from < 3; ++from) {
    for (std::size_t to = 0; to < kLine + 2; ++to) {
      for (std::size_t length = 0; length < 3 * kLine + 2; ++length) {
        std::memset(target, 0xEE, sizeof(target));
        store_streamed(source + from, target + to, length);
        finish_streamed_stores();
        std::byte expected[sizeof(target)];
        std::memset(expected, 0xEE, sizeof(expected));
        std::memcpy(expected + to, source + from, length);
        ASSERT_EQ(std::memcmp(target, expected, sizeof(target)), 0)
            << length << " bytes from " << from << " to " << to;
      }
    }
  }
}

}  // namespace
}  // namespace distmoe::cpu
