// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the chunks of a message cover it exactly, in order, and each fits an int, for messages
// beyond 2^31 and 2^32 bytes too.
// reports: A80, offsets of communication buffers in 64 bits.
#include "comm/chunks.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "comm/mpi/tags.hpp"

namespace distmoe {
namespace {

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

TEST(Chunks, CoverTheMessageExactly) {
  for (const std::uint64_t bytes :
       {std::uint64_t{0}, std::uint64_t{1}, kGiB - 1, kGiB, kGiB + 1, 2 * kGiB - 1, 2 * kGiB,
        2 * kGiB + 1, 4 * kGiB + 5, 64 * 5 * kGiB + 3}) {
    std::uint64_t end = 0;
    for (std::uint64_t i = 0; i < num_chunks(bytes); ++i) {
      const Chunk chunk = chunk_at(bytes, i);
      ASSERT_EQ(chunk.offset, end) << bytes;
      ASSERT_GT(chunk.bytes, 0) << bytes;
      end += static_cast<std::uint64_t>(chunk.bytes);
    }
    ASSERT_EQ(end, bytes);
  }
}

TEST(Chunks, HaveKnownOffsetsBeyondFourGiB) {
  constexpr std::uint64_t kBytes = 5 * kGiB + 7;
  EXPECT_EQ(num_chunks(kBytes), 6u);
  EXPECT_EQ(chunk_at(kBytes, 4).offset, 4294967296u);
  EXPECT_EQ(chunk_at(kBytes, 5).offset, 5368709120u);
  EXPECT_EQ(chunk_at(kBytes, 5).bytes, 7);
}

TEST(Chunks, DoNotWrapNearTheLargestSize) {
  constexpr std::uint64_t kBytes = std::numeric_limits<std::uint64_t>::max();
  EXPECT_EQ(num_chunks(kBytes), std::uint64_t{1} << 34);
  const Chunk last = chunk_at(kBytes, num_chunks(kBytes) - 1);
  EXPECT_EQ(last.offset + static_cast<std::uint64_t>(last.bytes), kBytes);
}

TEST(MpiTags, AreLegalEverywhereAndDistinctForCallsNearEachOther) {
  std::set<int> seen = {mpi::kControlTag};
  for (const std::uint64_t communicator : {1u, 2u, 126u}) {
    for (std::uint64_t call = 1; call <= 128; ++call) {
      const mpi::CallTags tags = mpi::tags_of(communicator, call);
      EXPECT_LE(tags.data, 32767);
      EXPECT_TRUE(seen.insert(tags.header).second) << communicator << " " << call;
      EXPECT_TRUE(seen.insert(tags.data).second) << communicator << " " << call;
    }
  }
}

}  // namespace
}  // namespace distmoe
