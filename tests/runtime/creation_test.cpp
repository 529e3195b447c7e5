// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a communicator whose rank is none of its size is refused with both before anything is
// exchanged; what one rank refuses in place of a creation is an error of all ranks at once, and
// they create the next context.
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "distmoe/context.hpp"
#include "distmoe/error.hpp"
#include "distmoe/refusal.hpp"

namespace distmoe {
namespace {

/// Only says who it is.
class Claim final : public Communicator {
 public:
  Claim(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  std::string_view name() const noexcept override { return "claim"; }
  void alltoallv(std::span<const std::span<const std::byte>>, std::span<const std::span<std::byte>>,
                 Timeout) override {
    ADD_FAILURE() << "an exchange";
  }
  void barrier(Timeout) override { ADD_FAILURE() << "a barrier"; }
  void abort(std::string_view) noexcept override {}

 private:
  int rank_;
  int size_;
};

Config small_config() {
  Config config;
  config.max_tokens = config.hidden_dim = config.intermediate_dim = 16;
  config.top_k = config.max_moe_layers_per_activation_slot = 1;
  config.num_experts = 4;
  return config;
}

TEST(Creation, RefusesARankThatIsNoneOfTheSize) {
  const Config config = small_config();
  constexpr int kMost = std::numeric_limits<int>::max();
  for (const auto& [rank, size] :
       {std::pair{2, 2}, {5, 2}, {-1, 2}, {0, 0}, {0, -1}, {-1, -1}, {kMost, kMost}}) {
    SCOPED_TRACE(std::to_string(rank) + " of " + std::to_string(size));
    try {
      Context::create(config, std::make_shared<Claim>(rank, size), {});
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(
          std::string(error.what()).find(std::to_string(rank) + " of " + std::to_string(size)),
          std::string::npos)
          << error.what();
    }
  }
}

TEST(Creation, IsRefusedOnEveryRankByOneThatHasNoConfig) {
  constexpr int kRanks = 3;
  std::vector<std::string> messages(kRanks);
  run_thread_group(kRanks, [&](const std::shared_ptr<Communicator>& communicator) {
    const int rank = communicator->rank();
    try {
      if (rank == 1) refuse_context(communicator, {ErrorCode::kInvalidArgument, "no config"});
      Context::create(small_config(), communicator, {});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      messages[static_cast<std::size_t>(rank)] = error.what();
    }
    EXPECT_EQ(Context::create(small_config(), communicator, {}).size(), kRanks);
  });
  for (const std::string& message : messages) {
    EXPECT_NE(message.find("no config"), std::string::npos) << message;
  }
  EXPECT_NE(messages[0].find("rank 1"), std::string::npos) << messages[0];
}

TEST(Creation, OfOneRankIsRefusedAlone) {
  EXPECT_THROW(refuse_context(nullptr, {ErrorCode::kInvalidArgument, "no config"}), Error);
}

}  // namespace
}  // namespace distmoe
