// SPDX-License-Identifier: Apache-2.0
// Invariant: ranks of a run go on with the same failure, values and settings, whichever rank they
// came from.
#include "rank_group.hpp"

#include <gtest/gtest.h>

#include <functional>

namespace distmoe::tools {
namespace {

constexpr int kRanks = 3;

void on_every_rank(const std::function<void(RankGroup&)>& body) {
  run_thread_group(kRanks, [&](const std::shared_ptr<Communicator>& communicator) {
    RankGroup group(communicator, std::chrono::seconds(30));
    body(group);
  });
}

TEST(RankGroup, GathersValuesInTheOrderOfRanks) {
  on_every_rank([](RankGroup& group) {
    const int rank = group.rank();
    EXPECT_EQ(group.all_gather(10 * rank), (std::vector<int>{0, 10, 20}));
    EXPECT_EQ(group.all_gather(std::vector<int>{rank, 10 * rank}),
              (std::vector<int>{0, 0, 1, 10, 2, 20}));
  });
}

TEST(RankGroup, LargestIsTakenPlaceByPlace) {
  const std::vector<std::vector<double>> own = {{-1, 5, 3}, {-2, 4, 9}, {-3, 6, 0}};
  on_every_rank([&](RankGroup& group) {
    EXPECT_EQ(group.largest(own[static_cast<std::size_t>(group.rank())]),
              (std::vector<double>{-1, 6, 9}));
    EXPECT_TRUE(group.largest(std::vector<double>{}).empty());
  });
}

TEST(RankGroup, AgreesOnTheWorstFailureOfTheLowestRank) {
  const std::vector<Failure> own = {
      {ExitCode::kWrongArguments, ErrorCode::kIo, "the file"},
      {ExitCode::kRuntimeFailure, ErrorCode::kOutOfMemory, "the memory"},
      {ExitCode::kRuntimeFailure, ErrorCode::kInternal, "the rest"}};
  on_every_rank([&](RankGroup& group) {
    const Failure failure = group.agree(own[static_cast<std::size_t>(group.rank())]);
    EXPECT_EQ(failure.exit_code, ExitCode::kRuntimeFailure);
    EXPECT_EQ(failure.error, ErrorCode::kOutOfMemory);
    EXPECT_EQ(failure.message, "the memory");
    EXPECT_FALSE(group.agree({}).happened());
  });
}

TEST(RankGroup, FindsTheRankThatWasStartedOtherwise) {
  on_every_rank([](RankGroup& group) {
    EXPECT_FALSE(group.find_difference("--tokens 4").happened());
    const Failure failure = group.find_difference(group.rank() == 2 ? "--tokens 5" : "--tokens 4");
    EXPECT_EQ(failure.error, ErrorCode::kPeerMismatch);
    EXPECT_NE(failure.message.find("rank 0 has --tokens 4, but rank 2 has --tokens 5"),
              std::string::npos)
        << failure.message;
  });
}

}  // namespace
}  // namespace distmoe::tools
