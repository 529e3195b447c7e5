// SPDX-License-Identifier: Apache-2.0
// Invariant: parts are contiguous, add up to the whole and differ by one at most, the larger ones
// first, unless a legal request says otherwise.
#include "token_split.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "distmoe/error.hpp"

namespace distmoe::tools {
namespace {

using Counts = std::vector<std::int64_t>;

// reports: A120
TEST(SplitEvenly, GivesTheFirstPartsOneMore) {
  EXPECT_EQ(split_evenly(30, 8), (Counts{4, 4, 4, 4, 4, 4, 3, 3}));
  EXPECT_EQ(split_evenly(128, 6), (Counts{22, 22, 21, 21, 21, 21}));
  EXPECT_EQ(split_evenly(5, 8), (Counts{1, 1, 1, 1, 1, 0, 0, 0}));
  EXPECT_EQ(split_evenly(0, 3), (Counts{0, 0, 0}));
}

TEST(SplitEvenly, AddsUpForEveryCountAndNumberOfParts) {
  for (std::int64_t count = 0; count <= 40; ++count) {
    for (int parts = 1; parts <= 9; ++parts) {
      const Counts split = split_evenly(count, parts);
      ASSERT_EQ(split.size(), static_cast<std::size_t>(parts));
      EXPECT_EQ(std::accumulate(split.begin(), split.end(), std::int64_t{0}), count);
      EXPECT_TRUE(std::is_sorted(split.rbegin(), split.rend()));
      EXPECT_LE(split.front() - split.back(), 1);
    }
  }
}

TEST(SplitTokens, TakesALegalRequestAsItIs) {
  EXPECT_EQ(split_tokens(512, 3, Counts{500, 0, 12}), (Counts{500, 0, 12}));
  EXPECT_EQ(split_tokens(7, 3, std::nullopt), (Counts{3, 2, 2}));
}

TEST(SplitTokens, RefusesAnotherSumOrNumberOfRanksWithBothNumbers) {
  try {
    split_tokens(512, 2, Counts{500, 13});
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_STREQ(error.what(), "--tokens-per-rank adds up to 513, but the input has 512 tokens");
  }
  try {
    split_tokens(512, 3, Counts{500, 12});
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "--tokens-per-rank has 2 entries for 3 ranks; it needs one a rank");
  }
}

TEST(FirstOfPart, SumsTheEarlierParts) {
  const Counts parts{4, 0, 3};
  EXPECT_EQ(first_of_part(parts, 0), 0);
  EXPECT_EQ(first_of_part(parts, 1), 4);
  EXPECT_EQ(first_of_part(parts, 2), 4);
}

}  // namespace
}  // namespace distmoe::tools
