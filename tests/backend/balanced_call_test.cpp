// SPDX-License-Identifier: Apache-2.0
//
// Invariant: balanced routing gives every route to one rank, its groups, tiles and work are what
// the kernels would make of these rows, and no launch of a call is empty.
#include "backend/cuda/select/balanced_call.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "backend/choice_inputs.hpp"

namespace distmoe::cuda {
namespace {

TEST(BalancedRows, EveryRouteIsARowOfOneRank) {
  ChoiceInputs inputs = qwen();
  for (const std::int64_t experts : {1, 5, 9, 128}) {
    inputs.num_experts = experts;
    inputs.top_k = std::min<std::int64_t>(experts, 3);
    for (const std::int64_t ranks : {1, 2, 3, 7}) {
      inputs.num_ranks = ranks;
      for (const std::int64_t tokens : {0, 1, 63, 1000}) {
        std::int64_t all = 0;
        for (std::int64_t rank = 0; rank < ranks; ++rank) {
          const BalancedRows rows = balanced_rows(inputs, rank, tokens);
          for (const Product product : {Product::kW13, Product::kW2}) {
            const GroupList& groups = rows.of(product);
            std::int64_t in_groups = 0;
            std::int64_t pairs = 0;
            for (const GroupKind& kind : groups.kinds) {
              EXPECT_GT(kind.num_rows, 0);
              in_groups += kind.count * kind.num_rows;
              pairs += kind.count * kind.tiling.num_pairs;
            }
            EXPECT_EQ(in_groups, rows.num_rows);
            EXPECT_EQ(pairs, groups.num_pairs);
            EXPECT_GE(groups.computed_rows, rows.num_rows);
          }
          EXPECT_LE(rows.active_experts, rows.num_local_experts);
          EXPECT_TRUE(ranks > 1 || rows.pulled_rows == 0);
          all += rows.num_rows;
        }
        EXPECT_EQ(all, ranks * tokens * inputs.top_k) << ranks << " ranks, E=" << experts;
      }
    }
  }
}

TEST(BalancedRows, FewTokensSpreadOverAllRanks) {
  ChoiceInputs inputs = qwen();
  for (const std::int64_t ranks : {2, 3, 8}) {
    inputs.num_ranks = ranks;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      const BalancedRows rows = balanced_rows(inputs, rank, 3);
      EXPECT_NEAR(static_cast<double>(rows.num_rows), 24.0, 2.0);
      EXPECT_EQ(rows.active_experts, std::min(rows.num_local_experts, rows.num_rows));
    }
  }
  inputs.num_ranks = 2;
  EXPECT_EQ(balanced_rows(inputs, 0, 3).num_rows, 24);
  EXPECT_EQ(balanced_rows(inputs, 0, 3).pulled_rows, 12);
  EXPECT_EQ(balanced_rows(inputs, 1, 3).num_rows, 24);
}

TEST(BalancedRows, W13PartsRowsByTheirArrivalWhereTheyAreMany) {
  ChoiceInputs inputs = qwen();
  inputs.num_ranks = 3;
  const auto kinds = [&](std::int64_t tokens) {
    const BalancedRows rows = balanced_rows(inputs, 1, tokens);
    EXPECT_EQ(rows.w2.kinds.size(), 1u);
    EXPECT_FALSE(rows.w2.kinds[0].waits_for_pull);
    return rows.w13.kinds;
  };
  // 64 rows an expert with 128 experts, then more.
  const std::int64_t few = kRowsNotParted * 128 / (3 * 8) / 16 * 16;
  ASSERT_EQ(kinds(few).size(), 1u);
  EXPECT_TRUE(kinds(few)[0].waits_for_pull);
  const auto many = kinds(8192);
  EXPECT_FALSE(many.front().waits_for_pull);
  EXPECT_TRUE(many.back().waits_for_pull);
}

// The rounds of docs/kernels/sm90_bf16_grouped_gemm.md: 23.3 and 31.03 on 66 clusters.
TEST(ProductLoad, CountsTilesAndWavesByHand) {
  const ChoiceInputs inputs = qwen();
  const ContextChoice choice = choose_kernels(inputs);
  const BalancedRows rows = balanced_rows(inputs, 0, 8192);
  EXPECT_EQ(rows.num_rows, 65536);
  EXPECT_EQ(rows_per_expert(inputs, 8192), 512.0);
  ASSERT_EQ(rows.w13.kinds.size(), 1u);
  EXPECT_EQ(rows.w13.kinds[0].tiling.rows_per_tile, 128);
  EXPECT_EQ(rows.w13.computed_rows, 65536);
  const ProductLoad w13 = product_load(Product::kW13, inputs, choice, rows);
  EXPECT_EQ(w13.m, 1536);
  EXPECT_EQ(w13.k, 2048);
  EXPECT_EQ(w13.cluster_tiles, 1536);
  EXPECT_EQ(w13.waves, 24);
  EXPECT_DOUBLE_EQ(w13.fill, 1536.0 / (24 * 66));
  EXPECT_EQ(w13.flops, std::int64_t{2} * 65536 * 1536 * 2048);
  EXPECT_EQ(w13.computed_flops, w13.flops);
  EXPECT_EQ(w13.weight_bytes, std::int64_t{128} * 1536 * 2048 * 2);
  EXPECT_EQ(w13.weight_load_bytes, 2 * w13.weight_bytes);
  const ProductLoad w2 = product_load(Product::kW2, inputs, choice, rows);
  EXPECT_EQ(w2.cluster_tiles, 2048);
  EXPECT_EQ(w2.waves, 32);
  EXPECT_EQ(w2.stages, 12);
}

TEST(ProductLoad, PaddingIsCounted) {
  ChoiceInputs inputs = qwen();
  inputs.hidden_dim = 72;  // two stages of 64, one half of a weight tile
  inputs.top_k = 1;
  inputs.num_experts = 1;
  const BalancedRows rows = balanced_rows(inputs, 0, 3);
  EXPECT_EQ(rows.num_rows, 3);
  EXPECT_EQ(rows.w13.computed_rows, 8);
  const ContextChoice choice = choose_kernels(inputs);
  EXPECT_EQ(product_load(Product::kW13, inputs, choice, rows).computed_flops,
            std::int64_t{2} * 8 * 1536 * 128);
  EXPECT_EQ(product_load(Product::kW2, inputs, choice, rows).computed_flops,
            std::int64_t{2} * 8 * 128 * 768);
}

TEST(ForwardLaunches, NoneIsEmptyAndASingleRankMeetsNobody) {
  ChoiceInputs inputs = qwen();
  for (const std::int64_t ranks : {1, 3}) {
    inputs.num_ranks = ranks;
    const ContextChoice choice = choose_kernels(inputs);
    for (const std::int64_t tokens : {0, 129, 4095}) {
      std::int64_t barriers = 0;
      std::int64_t of_tokens = 0;
      for (const NamedLaunch& launch : forward_launches(inputs, choice, 0, tokens, 4096)) {
        EXPECT_GT(launch.shape.blocks, 0) << launch.kernel;
        EXPECT_GT(launch.shape.threads, 0) << launch.kernel;
        barriers += std::string(launch.kernel) == "peer_barrier" ? 1 : 0;
        of_tokens += std::string(launch.kernel) == "combine" ? launch.shape.blocks : 0;
      }
      EXPECT_EQ(barriers, ranks == 1 ? 0 : 2);
      EXPECT_EQ(of_tokens, tokens);
    }
  }
}

TEST(ForwardLaunches, FewRowsOfASingleRankAreOneLaunch) {
  ChoiceInputs inputs = qwen();
  for (const Combine combine : {Combine::kPerRoute, Combine::kPerRank}) {
    inputs.combine = combine;
    for (const std::int64_t tokens : {1, 128}) {
      const auto launches = forward_launches(inputs, choose_kernels(inputs), 0, tokens, 4096);
      ASSERT_EQ(launches.size(), 1u);
      EXPECT_EQ(std::string(launches[0].kernel), "sm90_bf16_few_rows");
      EXPECT_EQ(launches[0].shape.blocks, 132);
    }
  }
}

TEST(ForwardLaunches, FewRowsWithPeersHaveBothProductsInOneLaunch) {
  ChoiceInputs inputs = qwen();
  inputs.num_ranks = 2;
  const auto names_of = [&](std::int64_t tokens, std::int64_t max_tokens) {
    std::string names;
    for (const NamedLaunch& launch :
         forward_launches(inputs, choose_kernels(inputs), 0, tokens, max_tokens)) {
      names += std::string(launch.kernel) + " ";
    }
    return names;
  };
  // Peers may send more than 2048 rows: the device takes one of the two ways.
  EXPECT_EQ(names_of(128, 257),
            "begin publish note peer_barrier count scan place "
            "sm90_bf16_few_rows w13_swiglu w2_scatter peer_barrier combine ");
  EXPECT_EQ(names_of(1, 129), "publish_route sm90_bf16_few_rows w13_swiglu w2_scatter combine ");
  EXPECT_EQ(names_of(128, 128), "publish_route sm90_bf16_few_rows peer_barrier combine ");
  EXPECT_EQ(names_of(33, 128), "publish_route sm90_bf16_few_rows combine ");
  EXPECT_EQ(names_of(0, 128), "publish_route w13_swiglu w2_scatter peer_barrier keep_fault ");
}

TEST(ForwardLaunches, AJoinedHeadHasABlockForIdsAndOthersForActivations) {
  ChoiceInputs inputs = qwen();
  inputs.num_ranks = 2;
  const auto head = [&](std::int64_t tokens) {
    return forward_launches(inputs, choose_kernels(inputs), 0, tokens, 128).front().shape;
  };
  EXPECT_EQ(head(0).blocks, 1);
  EXPECT_EQ(head(1).blocks, 2);
  EXPECT_EQ(head(128).blocks, 1 + 32);
  // Headers and ids of both ranks; groups of 64 experts; rows of ranks and experts; rows and tokens
  // of each rank before; first rows; counts of 8 warps.
  EXPECT_EQ(head(1).shared_bytes, 2 * (128 + 128 * 8 * 4) + 64 * 4 * 32 + (2 + 128) * 8 +
                                      (2 * 128 + 2) * 4 + 65 * 4 + 8 * 64 * 2);
}

TEST(ForwardLaunches, PerRankSendsSumsBeforeItMeetsThePeers) {
  ChoiceInputs inputs = qwen();
  inputs.combine = Combine::kPerRank;
  const auto names_of = [&] {
    std::string names;
    for (const NamedLaunch& launch :
         forward_launches(inputs, choose_kernels(inputs), 0, 500, 500)) {
      names += std::string(launch.kernel) + " ";
    }
    return names;
  };
  EXPECT_NE(names_of().find("w2_scatter combine_ranks "), std::string::npos) << names_of();
  inputs.num_ranks = 3;
  EXPECT_NE(names_of().find("w2_scatter rank_sums peer_barrier combine_ranks "), std::string::npos)
      << names_of();
}

}  // namespace
}  // namespace distmoe::cuda
