// SPDX-License-Identifier: Apache-2.0
// Invariant: random routing names K distinct experts of the group for every token, the same ones
// for the same seed, uniformly or with popular ones; captured routing is the file's, in its order.
#include "bench/bench_routing.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "distmoe/error.hpp"
#include "io/temporary_directory.hpp"
#include "io/write_safetensors.hpp"

namespace distmoe::tools {
namespace {

using Router = RoutedTokens (*)(const RoutingSize&, std::uint64_t);

constexpr RoutingSize kSize{2000, 4, 16};

std::vector<std::int64_t> count_experts(const RoutedTokens& tokens, std::int64_t num_experts) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(num_experts));
  for (const std::int32_t id : tokens.ids) ++counts[static_cast<std::size_t>(id)];
  return counts;
}

class RandomRouting : public ::testing::TestWithParam<Router> {};

TEST_P(RandomRouting, NamesDistinctExpertsOfTheGroup) {
  for (const std::int64_t top_k : {1, 4, 16}) {
    const RoutedTokens tokens = GetParam()({100, top_k, 16}, 3);
    ASSERT_EQ(std::ssize(tokens.ids), 100 * top_k);
    ASSERT_EQ(tokens.scores.size(), tokens.ids.size());
    EXPECT_FALSE(has_repeated_experts(tokens, top_k));
    for (const std::int32_t id : tokens.ids) EXPECT_TRUE(id >= 0 && id < 16) << id;
    const auto k = static_cast<float>(top_k);
    for (const float score : tokens.scores) {
      EXPECT_TRUE(score * k >= 0.5f && score * k <= 1.5f) << score;
    }
  }
}

TEST_P(RandomRouting, FollowsTheSeed) {
  const RoutedTokens once = GetParam()(kSize, 5);
  EXPECT_EQ(once.ids, GetParam()(kSize, 5).ids);
  EXPECT_EQ(once.scores, GetParam()(kSize, 5).scores);
  EXPECT_NE(once.ids, GetParam()(kSize, 6).ids);
}

INSTANTIATE_TEST_SUITE_P(Kinds, RandomRouting, ::testing::Values(uniform_routing, zipf_routing));

TEST(UniformRouting, LoadsAllExpertsAlike) {
  const auto counts = count_experts(uniform_routing(kSize, 1), kSize.num_experts);
  // 500 of 2000 tokens each; a standard deviation is 19.
  EXPECT_GT(*std::ranges::min_element(counts), 400);
  EXPECT_LT(*std::ranges::max_element(counts), 600);
}

TEST(ZipfRouting, HasTheSameHotExpertsForEverySeed) {
  const auto one = count_experts(zipf_routing(kSize, 1), kSize.num_experts);
  const auto two = count_experts(zipf_routing(kSize, 2), kSize.num_experts);
  const auto hottest = std::ranges::max_element(one) - one.begin();
  EXPECT_EQ(hottest, std::ranges::max_element(two) - two.begin());
  EXPECT_GT(one[static_cast<std::size_t>(hottest)], 3 * *std::ranges::min_element(one));
}

TEST(ZipfRouting, OneExpertATokenWeighsAsTheHarmonicSeries) {
  auto counts = count_experts(zipf_routing({20000, 1, 4}, 9), 4);
  std::ranges::sort(counts, std::greater());
  // Weights 1, 1/2, 1/3, 1/4 of 25/12: 9600, 4800, 3200, 2400.
  EXPECT_NEAR(static_cast<double>(counts[0]), 9600.0, 300.0);
  EXPECT_NEAR(static_cast<double>(counts[1]), 4800.0, 300.0);
  EXPECT_NEAR(static_cast<double>(counts[2]), 3200.0, 300.0);
  EXPECT_NEAR(static_cast<double>(counts[3]), 2400.0, 300.0);
}

class CapturedRoutingTest : public ::testing::Test {
 protected:
  /// Three tokens of two experts, one of them disabled.
  void write(DType ids_dtype, DType scores_dtype) {
    const std::vector<std::int64_t> wide(ids_.begin(), ids_.end());
    const std::vector<std::uint16_t> bf16_scores(6, 0x3F00);  // 0.5
    const void* ids = ids_dtype == DType::kI64 ? static_cast<const void*>(wide.data())
                                               : static_cast<const void*>(ids_.data());
    const void* scores = scores_dtype == DType::kF32 ? static_cast<const void*>(scores_.data())
                                                     : static_cast<const void*>(bf16_scores.data());
    const std::vector<std::uint16_t> x(3 * 8, 0x3F80);
    testing_write(TensorView(x.data(), DType::kBF16, {3, 8}), TensorView(ids, ids_dtype, {3, 2}),
                  TensorView(scores, scores_dtype, {3, 2}));
  }
  void testing_write(const TensorView& x, const TensorView& ids, const TensorView& scores) {
    distmoe::testing::write_safetensors(
        path(), {{"layer4.x", x}, {"layer4.topk_ids", ids}, {"layer4.topk_scores", scores}});
  }
  std::filesystem::path path() const { return folder_.path() / "routed"; }

  distmoe::testing::TemporaryDirectory folder_;
  std::vector<std::int32_t> ids_{5, 0, 1, -1, 3, 2};
  std::vector<float> scores_{.6F, .4F, .7F, .3F, .8F, .2F};
};

TEST_F(CapturedRoutingTest, RepeatsTheTokensOfTheFileInOrder) {
  for (const DType ids_dtype : {DType::kI32, DType::kI64}) {
    write(ids_dtype, DType::kF32);
    const CapturedRouting routing = CapturedRouting::open(path(), 4);
    const RoutedTokens tokens = routing.take({4, 2, 6}, 2);
    EXPECT_EQ(tokens.ids, (std::vector<std::int32_t>{3, 2, 5, 0, 1, -1, 3, 2}));
    EXPECT_EQ(tokens.scores, (std::vector<float>{.8F, .2F, .6F, .4F, .7F, .3F, .8F, .2F}));
  }
  write(DType::kI32, DType::kBF16);
  EXPECT_EQ(CapturedRouting::open(path(), 4).take({1, 2, 6}, 0).scores,
            (std::vector<float>{0.5F, 0.5F}));
}

TEST_F(CapturedRoutingTest, RefusesWhatDoesNotFitTheShape) {
  write(DType::kI32, DType::kF32);
  const CapturedRouting routing = CapturedRouting::open(path(), 4);
  try {
    routing.take({3, 3, 6}, 0);
    FAIL() << "K = 3 was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("2 experts a token"), std::string::npos);
  }
  try {
    routing.take({3, 2, 5}, 0);
    FAIL() << "expert 5 of 5 was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("expert 5"), std::string::npos);
  }
  EXPECT_THROW(CapturedRouting::open(path(), 5), Error);
}

TEST(RepeatedExperts, AreFoundInTheSameTokenAlone) {
  EXPECT_FALSE(has_repeated_experts({{1, 2, 2, 1}, {}}, 2));
  EXPECT_TRUE(has_repeated_experts({{1, 2, 3, 3}, {}}, 2));
  EXPECT_FALSE(has_repeated_experts({{-1, -1}, {}}, 2));
}

}  // namespace
}  // namespace distmoe::tools
