// SPDX-License-Identifier: Apache-2.0
//
// Invariant: one exception type carries a code and a message with the values; a check that holds
// evaluates nothing but its condition.
#include "distmoe/error.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <type_traits>

#include "core/check.hpp"

namespace distmoe {
namespace {

constexpr ErrorCode kAllCodes[] = {
    ErrorCode::kInvalidArgument, ErrorCode::kUnsupported,  ErrorCode::kCapacityExceeded,
    ErrorCode::kOutOfMemory,     ErrorCode::kPeerMismatch, ErrorCode::kPeerLost,
    ErrorCode::kClosed,          ErrorCode::kDeviceFault,  ErrorCode::kIo,
    ErrorCode::kInternal,
};

static_assert(std::is_base_of_v<std::runtime_error, Error>);
static_assert(std::is_nothrow_copy_constructible_v<Error>,
              "an exception must copy without throwing");

TEST(ErrorCode, EveryCodeHasItsOwnSnakeCaseName) {
  std::set<std::string> names;
  for (const ErrorCode code : kAllCodes) {
    const std::string name = to_string(code);
    EXPECT_TRUE(names.insert(name).second) << name;
    EXPECT_EQ(name.find_first_not_of("abcdefghijklmnopqrstuvwxyz_"), std::string::npos) << name;
  }
  EXPECT_STREQ(to_string(ErrorCode::kInvalidArgument), "invalid_argument");
  EXPECT_STREQ(to_string(ErrorCode::kPeerLost), "peer_lost");
  EXPECT_STREQ(to_string(ErrorCode::kIo), "io");
}

TEST(ErrorCode, ValueOutsideTheEnumIsNamedUnknown) {
  EXPECT_STREQ(to_string(static_cast<ErrorCode>(99)), "unknown");
}

TEST(Error, CopyKeepsCodeAndMessageWhenTheOriginalIsGone) {
  auto original =
      std::make_unique<Error>(ErrorCode::kCapacityExceeded, "rank 3 needs 65 rows, 64 are planned");
  const Error copy = *original;
  original.reset();
  EXPECT_EQ(copy.code(), ErrorCode::kCapacityExceeded);
  EXPECT_STREQ(copy.what(), "rank 3 needs 65 rows, 64 are planned");
}

TEST(Check, FailureThrowsTheCodeWithAllValuesJoined) {
  const int given = 9;
  try {
    DISTMOE_CHECK(given <= 8, kInvalidArgument, "T is ", given, "; at most ", 8, " were planned");
    FAIL() << "the check let 9 pass";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_STREQ(error.what(), "T is 9; at most 8 were planned");
  }
}

TEST(Check, SuccessDoesNotEvaluateTheMessage) {
  int evaluations = 0;
  const auto expensive = [&] { return ++evaluations; };
  DISTMOE_CHECK(true, kInternal, expensive());
  EXPECT_EQ(evaluations, 0);
  EXPECT_THROW(DISTMOE_CHECK(false, kInternal, expensive()), Error);
  EXPECT_EQ(evaluations, 1);
}

TEST(Check, IsOneStatementInAnIfWithoutBraces) {
  bool reached_else = false;
  if (kAllCodes[0] == ErrorCode::kIo)
    DISTMOE_CHECK(false, kInternal, "unreachable");
  else
    reached_else = true;
  EXPECT_TRUE(reached_else);
}

TEST(Check, ConditionWithCommasInParenthesesIsEvaluatedOnce) {
  int evaluations = 0;
  const auto condition = [&](int a, int b) {
    ++evaluations;
    return a < b;
  };
  DISTMOE_CHECK(condition(1, 2), kInternal, "unreachable");
  EXPECT_EQ(evaluations, 1);
}

}  // namespace
}  // namespace distmoe
