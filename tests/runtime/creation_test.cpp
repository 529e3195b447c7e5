// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a communicator whose rank is none of its size is refused with both before anything is
// exchanged.
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "distmoe/context.hpp"
#include "distmoe/error.hpp"

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

TEST(Creation, RefusesARankThatIsNoneOfTheSize) {
  Config config;
  config.max_tokens = config.hidden_dim = config.intermediate_dim = 16;
  config.top_k = config.max_moe_layers_per_activation_slot = 1;
  config.num_experts = 4;
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

}  // namespace
}  // namespace distmoe
