// SPDX-License-Identifier: Apache-2.0
// Invariant: every layer of every checkpoint agrees with the captured reference, and y has the same
// bits for every number of ranks, engine and split of the tokens.
#include <gtest/gtest.h>

#include <tuple>

#include "command_testing.hpp"

namespace distmoe::tools {
namespace {

// A faithful BF16 implementation measures 2.4e-3..2.9e-3.
constexpr double kFaithful = 3.2e-3;

struct Model {
  const char* name;
  std::int64_t hidden_dim;
  std::int64_t num_experts;
};

class RunCheckpoints : public CommandTest,
                       public testing::WithParamInterface<std::tuple<Model, int>> {
 protected:
  void SetUp() override {
    checkpoint_ = checkpoint_folder(model().name);
    if (checkpoint_.empty()) GTEST_SKIP() << "no checkpoint " << model().name;
  }

  static Model model() { return std::get<0>(GetParam()); }

  Words words(const Words& more) const {
    Words words{"--layer", std::to_string(std::get<1>(GetParam())), "--json", "--output",
                file("y")};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  /// The bytes of y of one run, which must be a faithful one of `ranks` ranks.
  std::string y_of(const CommandResult& result, int ranks) const {
    EXPECT_EQ(result.exit_code, 0) << result.error;
    if (result.exit_code != 0) return "failed";
    const nlohmann::json json = result.json();
    EXPECT_LE(json["rel_l2"].get<double>(), kFaithful);
    EXPECT_GT(json["rel_l2"].get<double>(), 0.0);
    EXPECT_EQ(json["ranks"], ranks);
    EXPECT_EQ(json["tokens"], 512);
    std::int64_t experts = 0;
    for (const auto& count : json["experts_per_rank"]) experts += count.get<std::int64_t>();
    EXPECT_EQ(experts, model().num_experts);
    return read_y(file("y"), 512, model().hidden_dim);
  }

  std::filesystem::path checkpoint_;
};

TEST_P(RunCheckpoints, AgreeWithTheReferenceAndKeepTheirBitsForEveryNumberOfThreads) {
  const std::string y = y_of(run(checkpoint_, words({})), 1);
  for (const int ranks : {2, 3, 4, 5, 8}) {
    SCOPED_TRACE(ranks);
    EXPECT_TRUE(y == y_of(run(checkpoint_, words({"--ranks", std::to_string(ranks)})), ranks));
  }
}

TEST_P(RunCheckpoints, KeepTheirBitsForEverySplitOfTheTokens) {
  const std::string y = y_of(run(checkpoint_, words({})), 1);
  for (const auto& [split, ranks] : {std::pair<const char*, int>{"0,512", 2},
                                     {"1,510,1", 3},
                                     {"0,200,0,0,312", 5},
                                     {"63,65,129,255", 4}}) {
    SCOPED_TRACE(split);
    EXPECT_TRUE(y == y_of(run(checkpoint_, words({"--tokens-per-rank", split})), ranks));
  }
}

TEST_P(RunCheckpoints, KeepTheirBitsUnderMpi) {
  if (!mpi_problem().empty()) GTEST_SKIP() << mpi_problem();
  const std::string y = y_of(run(checkpoint_, words({})), 1);
  for (const int ranks : {1, 2, 4}) {
    SCOPED_TRACE(ranks);
    EXPECT_TRUE(y == y_of(run_mpi(ranks, checkpoint_, words({})), ranks));
  }
  EXPECT_TRUE(y == y_of(run_mpi(3, checkpoint_, words({"--tokens-per-rank", "500,0,12"})), 3));
}

INSTANTIATE_TEST_SUITE_P(
    Models, RunCheckpoints,
    testing::Combine(testing::Values(Model{"qwen3moe", 256, 16}, Model{"mixtral", 256, 8},
                                     Model{"gptoss", 192, 8}, Model{"deepseekv3", 256, 32}),
                     testing::Values(0, 1)),
    [](const auto& test) {
      return std::string(std::get<0>(test.param).name) + "Layer" +
             std::to_string(std::get<1>(test.param));
    });

}  // namespace
}  // namespace distmoe::tools
