// SPDX-License-Identifier: Apache-2.0
// Invariant: two outputs of one length that differ in any single bit have different digests.
#include "digest.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace distmoe::tools {
namespace {

TEST(Digest, ChangesWithEverySingleBitAtAnyLength) {
  for (const std::size_t length : {1u, 7u, 8u, 9u, 64u, 65u}) {
    std::vector<std::byte> bytes(length);
    for (std::size_t i = 0; i < length; ++i) bytes[i] = static_cast<std::byte>(i * 37 + 11);
    const Digest original = digest_of(bytes);
    EXPECT_EQ(digest_of(bytes), original);
    for (std::size_t bit = 0; bit < length * 8; ++bit) {
      bytes[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
      const Digest changed = digest_of(bytes);
      EXPECT_NE(changed.low, original.low) << length << " bytes, bit " << bit;
      EXPECT_NE(changed.high, original.high) << length << " bytes, bit " << bit;
      bytes[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    }
  }
}

TEST(Digest, DependsOnOrderAndLength) {
  const std::vector<std::byte> zeros(32);
  EXPECT_NE(digest_of(zeros), digest_of(std::span(zeros).first(24)));
  std::vector<std::byte> first(16), second(16);
  first[0] = second[8] = std::byte{1};
  EXPECT_NE(digest_of(first), digest_of(second));
}

}  // namespace
}  // namespace distmoe::tools
