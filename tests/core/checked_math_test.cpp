// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a size is either exact in 64 bits or an invalid_argument that names both operands.
#include "core/checked_math.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>

namespace distmoe {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();

template <typename Body>
std::string message_of(Body body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

TEST(CheckedMath, SumsAndProductsReachTheEdgesOf64Bits) {
  EXPECT_EQ(checked_add(kMax - 1, 1), kMax);
  EXPECT_EQ(checked_add(kMin + 1, -1), kMin);
  EXPECT_EQ(checked_mul(kMax / 2, 2), kMax - 1);
  EXPECT_EQ(checked_mul(kMin, 1), kMin);
  EXPECT_EQ(checked_mul(kMax, 0), 0);
}

TEST(CheckedMath, OverflowNamesBothOperands) {
  const std::string sum = message_of([] { checked_add(kMax, 7); });
  EXPECT_NE(sum.find(std::to_string(kMax) + " + 7"), std::string::npos) << sum;
  const std::string product = message_of([] { checked_mul(kMax, 3); });
  EXPECT_NE(product.find(std::to_string(kMax) + " * 3"), std::string::npos) << product;
  message_of([] { checked_add(kMin, -1); });
  message_of([] { checked_mul(kMin, -1); });
}

TEST(CheckedMath, ProductOfManyFactorsStopsAtTheOneThatOverflows) {
  EXPECT_EQ(checked_product(7), 7);
  EXPECT_EQ(checked_product(3, 5, 7, 11), 1155);
  const std::string message = message_of([] { checked_product(1LL << 31, 1LL << 31, 4, 5); });
  EXPECT_NE(message.find(std::to_string(1LL << 62) + " * 4"), std::string::npos) << message;
}

// reports: A77, A78: sizes that wrapped in 32 bits elsewhere.
TEST(CheckedMath, RowOffsetsBeyond32BitsAreExact) {
  EXPECT_EQ(checked_product(100000, 6, 4096), 2457600000LL);
  EXPECT_EQ(checked_product(56000, 8, 7168), 3211264000LL);
  EXPECT_EQ(checked_product(65535, 10, 4096), 2684313600LL);
  EXPECT_EQ(checked_add(checked_mul(1525201, 2816), 2815), 4294968831LL);
  EXPECT_EQ(checked_mul(1398102, 1536) > (1LL << 31), true);
  EXPECT_EQ(checked_mul(299594, 7168) > (1LL << 31), true);
}

TEST(CheckedMath, CeilDivRoundsUpWithoutOverflowAtTheTop) {
  EXPECT_EQ(ceil_div(0, 128), 0);
  EXPECT_EQ(ceil_div(1, 128), 1);
  EXPECT_EQ(ceil_div(128, 128), 1);
  EXPECT_EQ(ceil_div(129, 128), 2);
  EXPECT_EQ(ceil_div(kMax, 2), kMax / 2 + 1);
}

TEST(CheckedMath, AlignUpGivesTheNextMultipleOf128OrRefuses) {
  EXPECT_EQ(align_up(0), 0);
  EXPECT_EQ(align_up(1), 128);
  EXPECT_EQ(align_up(128), 128);
  EXPECT_EQ(align_up(129), 256);
  EXPECT_EQ(align_up(kMax - 127), kMax - 127);
  message_of([] { align_up(kMax); });
}

}  // namespace
}  // namespace distmoe
