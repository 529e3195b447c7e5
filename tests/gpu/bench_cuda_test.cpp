// SPDX-License-Identifier: Apache-2.0
// Invariant: `distmoe bench` on GPUs times right calls, eagerly and in graphs, whole and by steps,
// with ranks that share a GPU and with ranks that have one each.
#include <gtest/gtest.h>

#include "backend/backend.hpp"
#include "backend/cuda/device.hpp"
#include "tools/command_testing.hpp"

namespace distmoe::tools {
namespace {

class BenchCuda : public CommandTest {
 protected:
  void SetUp() override {
    const std::string reason = cuda::why_unavailable();
    if (!reason.empty()) GTEST_SKIP() << "no CUDA device: " << reason;
  }
  /// As many tokens as have launches of their own for every step.
  static constexpr const char* kManyTokens = "300";
  /// As few as one rank calls in one launch.
  static constexpr const char* kFewTokens = "100";

  nlohmann::json bench(const Words& more, const char* tokens = kManyTokens) {
    Words words = {command_path(), "bench",       "--backend", "cuda", "--rounds", "3",
                   "--shape",      "256,128,8,2", "--tokens",  tokens, "--json"};
    words.insert(words.end(), more.begin(), more.end());
    const CommandResult result = run_words(words);
    EXPECT_EQ(result.exit_code, 0) << result.error;
    EXPECT_EQ(result.error, "");
    return result.json();
  }
};

TEST_F(BenchCuda, EagerCallsAndGraphsAreRight) {
  for (const char* tokens : {kFewTokens, kManyTokens}) {
    for (const Words& more : {Words{}, Words{"--graph"}}) {
      const nlohmann::json row = bench(more, tokens);
      EXPECT_EQ(row["backend"], "cuda");
      EXPECT_EQ(row["graph"], !more.empty());
      EXPECT_GT(row["median_us"], 0.0);
      EXPECT_GT(row["copy_tb_s"], 0.0);
      EXPECT_GT(row["read_tb_s"], 0.0);
      EXPECT_LE(row["rel_l2"], 8e-3);
      EXPECT_EQ(row["repeat_bitwise_equal"], true);
    }
  }
}

TEST_F(BenchCuda, StepsAreTimedInWholeCallsThatAreRight) {
  for (const std::string mode : {"dispatch", "gemm", "combine"}) {
    for (const Words& graph : {Words{}, Words{"--graph"}}) {
      Words words = {"--mode", mode};
      words.insert(words.end(), graph.begin(), graph.end());
      const nlohmann::json row = bench(words);
      EXPECT_EQ(row["mode"], mode);
      EXPECT_GT(row["median_us"], 0.0) << mode;
      EXPECT_LE(row["rel_l2"], 8e-3);
      EXPECT_EQ(row["repeat_bitwise_equal"], true);
    }
  }
}

TEST_F(BenchCuda, ExchangesReturnEveryTokenTimesItsScores) {
  for (const std::string mode : {"exchange", "exchange-dispatch", "exchange-combine"}) {
    for (const std::string combine : {"per_route", "per_rank"}) {
      for (const std::string ranks : {"1", "3"}) {
        Words words = {"--mode", mode, "--combine", combine, "--ranks", ranks, "--sms", "24"};
        if (ranks == "3") words.emplace_back("--graph");
        const nlohmann::json row = bench(words);
        EXPECT_EQ(row["mode"], mode);
        EXPECT_TRUE(row["tflops"].is_null());
        EXPECT_LE(row["rel_l2"], 4e-3) << mode << " " << combine << " " << ranks;
        EXPECT_EQ(row["repeat_bitwise_equal"], true);
      }
    }
  }
}

TEST_F(BenchCuda, RanksMayShareAGpu) {
  for (const Words& more : {Words{"--ranks", "4", "--routing", "zipf"},
                            Words{"--ranks", "3", "--graph", "--mode", "gemm"}}) {
    EXPECT_LE(bench(more)["rel_l2"], 8e-3);
  }
}

TEST_F(BenchCuda, TwoGpusHaveALinkWhoseRateIsMeasured) {
  if (cuda::device_count() < 2) GTEST_SKIP() << "needs two GPUs";
  EXPECT_GT(bench({"--ranks", "2"})["link_gb_s"], 0.0);
  EXPECT_TRUE(bench({})["link_gb_s"].is_null());
}

}  // namespace
}  // namespace distmoe::tools
