// SPDX-License-Identifier: Apache-2.0
//
// Invariant: blocks are contiguous, cover every expert once, differ by at most one expert, the
// longer ones come first, and the owner lookup is their inverse, for every E and P.
#include "plan/expert_partition.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace distmoe {
namespace {

std::vector<std::int64_t> block_sizes(std::int64_t num_experts, std::int64_t ep_size) {
  std::vector<std::int64_t> sizes;
  sizes.reserve(static_cast<std::size_t>(ep_size));
  for (std::int64_t rank = 0; rank < ep_size; ++rank) {
    sizes.push_back(num_local_experts(num_experts, ep_size, rank));
  }
  return sizes;
}

TEST(ExpertPartition, GivesTheFirstRanksOneMoreExpert) {  // reports: A120
  using Sizes = std::vector<std::int64_t>;
  EXPECT_EQ(block_sizes(30, 8), (Sizes{4, 4, 4, 4, 4, 4, 3, 3}));
  EXPECT_EQ(block_sizes(128, 6), (Sizes{22, 22, 21, 21, 21, 21}));
  EXPECT_EQ(block_sizes(384, 7), (Sizes{55, 55, 55, 55, 55, 55, 54}));
  EXPECT_EQ(block_sizes(8, 3), (Sizes{3, 3, 2}));
  EXPECT_EQ(block_sizes(5, 8), (Sizes{1, 1, 1, 1, 1, 0, 0, 0}));
}

TEST(ExpertPartition, BlocksAreContiguousAndOwnersInvertThem) {  // reports: A54, A120
  for (const std::int64_t experts : {1, 3, 5, 6, 8, 30, 60, 65, 128, 160, 257, 384, 2048}) {
    for (std::int64_t ranks = 1; ranks <= 70; ++ranks) {
      std::int64_t next = 0;
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        ASSERT_EQ(first_expert(experts, ranks, rank), next) << experts << " on " << ranks;
        const std::int64_t count = num_local_experts(experts, ranks, rank);
        ASSERT_LE(count, max_local_experts(experts, ranks));
        ASSERT_GE(count + 1, max_local_experts(experts, ranks));
        for (std::int64_t i = 0; i < count; ++i) {
          ASSERT_EQ(expert_owner(experts, ranks, next + i), rank) << experts << " on " << ranks;
        }
        next += count;
      }
      ASSERT_EQ(next, experts);
      ASSERT_EQ(first_expert(experts, ranks, ranks), experts);
    }
  }
}

}  // namespace
}  // namespace distmoe
