// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the buffers outside slots and scratch are as large as the largest call of the plan
// needs, aligned, named once each, and there is no communication buffer without peers.
#include "layout/context_buffers.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "layout/cpu_workspace.hpp"
#include "layout/packed_row.hpp"
#include "plan/plan_testing.hpp"

namespace distmoe {
namespace {

std::int64_t bytes_of(const std::vector<PlanBuffer>& buffers, const std::string& name) {
  for (const PlanBuffer& buffer : buffers) {
    if (buffer.name == name) return buffer.bytes;
  }
  ADD_FAILURE() << "no buffer " << name;
  return -1;
}

// T=64 K=3 D=96 E=10 in all cases: a token row has 192 bytes.

TEST(ContextBuffers, ASingleRankHasNoCommunicationBuffers) {
  EXPECT_TRUE(context_buffers(small_config(), 1, {}, {192, 192}, 10).communication.empty());
}

TEST(ContextBuffers, PerRouteStagingHoldsTheLargerOfDispatchAndCombine) {
  Config config = small_config();
  config.inference = true;
  const ContextBuffers buffers = context_buffers(config, 4, {}, {384, 384}, 3);
  // Combine sends a row back for every received row; it brings a row for every route.
  EXPECT_EQ(bytes_of(buffers.communication, "send staging"), 384 * 192);
  EXPECT_EQ(bytes_of(buffers.communication, "receive staging"), 64 * 3 * 192);
  EXPECT_EQ(buffers.communication.size(), 2u);
}

TEST(ContextBuffers, PerRankStagingCarriesFloatRowsAndScores) {
  Config config = small_config();
  config.inference = true;
  config.combine = Combine::kPerRank;
  const ContextBuffers buffers = context_buffers(config, 3, {}, {384, 384}, 4);
  // Two peers bring at most two rows of a token each way; combine rows are FP32.
  EXPECT_EQ(bytes_of(buffers.communication, "send staging"), 64 * 2 * 384);
  EXPECT_EQ(bytes_of(buffers.communication, "receive staging"), 64 * 2 * 384);
  EXPECT_EQ(bytes_of(buffers.communication, "score send"), 64 * 3 * 4);
  EXPECT_EQ(bytes_of(buffers.communication, "score receive"), 384 * 4);
}

TEST(ContextBuffers, BackwardTakesTheStagingOfPerRouteAndBuffersForScores) {
  const auto expect_buffers = [](const Config& config, std::int64_t send, std::int64_t receive) {
    const ContextBuffers buffers = context_buffers(config, 4, {}, {384, 384}, 3);
    EXPECT_EQ(bytes_of(buffers.communication, "send staging"), send);
    EXPECT_EQ(bytes_of(buffers.communication, "receive staging"), receive);
    EXPECT_EQ(bytes_of(buffers.communication, "score send"), 64 * 3 * 4);
    EXPECT_EQ(bytes_of(buffers.communication, "score receive"), 384 * 4);
    EXPECT_EQ(buffers.communication.size(), 4u);
  };
  Config config = small_config();
  expect_buffers(config, 384 * 192, 64 * 3 * 192);
  // Route gradients return as rows of BF16 whatever the combine sends: here FP32 rows of 192
  // received tokens, and of the 192 that this rank sent.
  config.combine = Combine::kPerRank;
  expect_buffers(config, 192 * 384, 64 * 3 * 384);
  EXPECT_EQ(context_buffers(config, 1, {}, {192, 192}, 10).communication.size(), 0u);
}

TEST(ContextBuffers, MetadataIsOneSetForInferenceAndOneMorePerSavedCall) {
  Config config = small_config();
  config.max_moe_layers_per_activation_slot = 5;
  config.num_activation_slots = 4;
  const ContextBuffers training = context_buffers(config, 3, {}, {384, 384}, 4);
  EXPECT_EQ(bytes_of(training.metadata, "tokens of all ranks"), 128);  // 3 int64
  EXPECT_EQ(bytes_of(training.metadata, "ids of all ranks"), 3 * 192 * 4);
  EXPECT_EQ(bytes_of(training.metadata, "scores"), 192 * 4);
  EXPECT_EQ(bytes_of(training.metadata, "row origins"), 384 * 12);
  EXPECT_EQ(bytes_of(training.metadata, "received row of a row"), 384 * 4);
  EXPECT_EQ(bytes_of(training.metadata, "row of a route"), 192 * 8);
  EXPECT_EQ(bytes_of(training.metadata, "row counts"), 256);  // 10 * 3 int64
  EXPECT_EQ(bytes_of(training.metadata, "expert offsets"), 128);
  EXPECT_EQ(bytes_of(training.metadata, "saved row counts"), 4 * 5 * 256);
  config.inference = true;
  const ContextBuffers inference = context_buffers(config, 3, {}, {384, 384}, 4);
  EXPECT_EQ(inference.metadata.size(), 8u);
  EXPECT_EQ(training.metadata.size(), 16u);
}

TEST(ContextBuffers, SlotRecordsFollowSlotsLayersAndRanks) {
  Config config = small_config();
  config.max_moe_layers_per_activation_slot = 50;
  config.num_activation_slots = 40;
  for (const BackendKind backend : {BackendKind::kCpu, BackendKind::kCuda}) {
    const ContextBuffers training = context_buffers(config, 3, {.backend = backend}, {384, 384}, 4);
    EXPECT_EQ(bytes_of(training.control, "slot states"), 1024);              // 40 * 24, aligned
    EXPECT_EQ(bytes_of(training.control, "slot bytes of all ranks"), 1024);  // 40 * 3 * 8
    EXPECT_EQ(bytes_of(training.control, "saved layers"), 80000);            // 40 * 50 * 40
    EXPECT_EQ(bytes_of(training.control, "slot bytes before a layer"), 48000);
  }
  config.inference = true;
  EXPECT_EQ(context_buffers(config, 3, {}, {384, 384}, 4).control.size(), 2u);
}

TEST(ContextBuffers, ControlAndWorkspaceFollowRanksAndThreads) {
  const PlanTarget target{BackendKind::kCpu, 6};
  const ContextBuffers buffers = context_buffers(small_config(), 5, target, {192, 192}, 2);
  EXPECT_EQ(bytes_of(buffers.control, "call headers"), 5 * kCallHeaderBytes);
  EXPECT_EQ(bytes_of(buffers.control, "error record"), kErrorRecordBytes);
  EXPECT_EQ(bytes_of(buffers.workspace, "matrix workspace"),
            6 * CpuWorkspaceLayout(small_config()).bytes);
}

TEST(ContextBuffers, CudaPerRouteHasARowForEveryRoute) {
  Config config = small_config();
  config.inference = true;
  const ContextBuffers buffers =
      context_buffers(config, 3, {.backend = BackendKind::kCuda}, {384, 384}, 4);
  EXPECT_EQ(bytes_of(buffers.communication, "dispatch window"), 64 * 192);
  EXPECT_EQ(bytes_of(buffers.communication, "id window"), 128 + 64 * 3 * 4);
  EXPECT_EQ(bytes_of(buffers.communication, "combine window"), 64 * 3 * 192);
  EXPECT_EQ(bytes_of(buffers.communication, "flag window"), 128);
  EXPECT_EQ(bytes_of(buffers.metadata, "result row addresses"), 384 * 8);
}

/// A backward publishes dy, and scores whatever the combine; it finds the rows of a token.
TEST(ContextBuffers, CudaTrainingPublishesDyAndScores) {
  const PlanTarget target{.backend = BackendKind::kCuda};
  const ContextBuffers three = context_buffers(small_config(), 3, target, {384, 384}, 4);
  EXPECT_EQ(bytes_of(three.communication, "dispatch window"), 2 * 64 * 192);
  EXPECT_EQ(cuda_dy_offset(small_config()), 64 * 192);
  EXPECT_EQ(bytes_of(three.communication, "id window"), 128 + 64 * 3 * 4 + 64 * 3 * 4);
  EXPECT_EQ(bytes_of(three.control, "training frame"), 128);
  // Own tokens, and those of two peers, at most 128.
  EXPECT_EQ(bytes_of(three.workspace, "rows of a token"), (64 + 128) * 3 * 4);
  const ContextBuffers one = context_buffers(small_config(), 1, target, {192, 192}, 10);
  EXPECT_EQ(one.communication.size(), 2u);
  EXPECT_EQ(bytes_of(one.communication, "id window"), 128 + 64 * 3 * 4);
  EXPECT_EQ(bytes_of(one.workspace, "rows of a token"), 64 * 3 * 4);
}

TEST(ContextBuffers, CudaPerRankHasAFloatRowForEveryPeerOfATokenAndPublishesScores) {
  Config config = small_config();
  config.inference = true;
  config.combine = Combine::kPerRank;
  const PlanTarget target{.backend = BackendKind::kCuda};
  const ContextBuffers three = context_buffers(config, 3, target, {384, 384}, 4);
  EXPECT_EQ(bytes_of(three.communication, "id window"), 128 + 64 * 3 * 4 + 64 * 3 * 4);
  EXPECT_EQ(cuda_score_offset(config), 128 + 64 * 3 * 4);
  EXPECT_EQ(bytes_of(three.communication, "combine window"), 64 * 2 * 384);
  EXPECT_EQ(bytes_of(three.metadata, "row of a route"), 64 * 3 * 4);
  // Two peers bring at most 128 tokens.
  EXPECT_EQ(bytes_of(three.metadata, "addresses of sums"), 128 * 8);
  EXPECT_EQ(bytes_of(three.metadata, "rows of sums"), 128 * 3 * 4);
  EXPECT_EQ(bytes_of(three.metadata, "scores of sums"), 128 * 3 * 4);
  EXPECT_EQ(three.metadata.size(), 11u);
  // More peers than routes: a token has at most K sums.
  EXPECT_EQ(
      bytes_of(context_buffers(config, 9, target, {384, 384}, 2).communication, "combine window"),
      64 * 3 * 384);
  const ContextBuffers one = context_buffers(config, 1, target, {192, 192}, 10);
  EXPECT_EQ(one.communication.size(), 1u);
  EXPECT_EQ(bytes_of(one.communication, "id window"), 128 + 64 * 3 * 4);
  EXPECT_EQ(one.metadata.size(), 8u);
}

TEST(ContextBuffers, NamesAreUnique) {
  Config config = small_config();
  config.combine = Combine::kPerRank;
  for (const BackendKind backend : {BackendKind::kCpu, BackendKind::kCuda}) {
    const ContextBuffers buffers = context_buffers(config, 3, {.backend = backend}, {384, 384}, 4);
    std::set<std::string> names;
    std::size_t count = 0;
    for (const auto* list :
         {&buffers.communication, &buffers.metadata, &buffers.control, &buffers.workspace}) {
      for (const PlanBuffer& buffer : *list) names.insert(buffer.name), ++count;
    }
    EXPECT_EQ(names.size(), count);
  }
}

TEST(ContextBuffers, BlockScaledRowsHaveResultsOfTheirOwnAndTravelPacked) {
  Config config = small_config();  // T=64 K=3 D=96
  config.precision = Precision::kNVFP4;
  config.inference = true;
  EXPECT_EQ(PackedRowLayout(Precision::kNVFP4, 96).bytes, 64);   // 48 codes, 4 and 6 scales
  EXPECT_EQ(PackedRowLayout(Precision::kMXFP8, 96).bytes, 112);  // 96 codes and 3 scales
  EXPECT_EQ(PackedRowLayout(Precision::kMXFP8, 96).scales, 96);
  const ContextBuffers one = context_buffers(config, 1, {}, {192, 512}, 10);
  ASSERT_EQ(one.communication.size(), 1u);
  EXPECT_EQ(bytes_of(one.communication, "results of rows"), 512 * 96 * 2);
  EXPECT_EQ(bytes_of(one.metadata, "row origins"), 512 * 12);
  config.combine = Combine::kPerRank;  // FP32 sums travel back: 64 tokens to and from 2 peers
  const ContextBuffers three = context_buffers(config, 3, {}, {384, 640}, 4);
  EXPECT_EQ(bytes_of(three.communication, "send staging"), 64 * 2 * 96 * 4);
  EXPECT_EQ(dispatched_row_bytes(config), 64);
  config.precision = Precision::kMXFP8;
  config.inference = false;
  EXPECT_EQ(dispatched_row_bytes(config), 192);  // training sends BF16
}

}  // namespace
}  // namespace distmoe
