// SPDX-License-Identifier: Apache-2.0
//
// Invariant: forward and backward captured in one graph give, replay by replay, the bits of the
// calls, also where one replay saves and the next computes again; a forward that fails on the
// device has a backward that fails, which changes nothing that it was to add to; a backward that
// one host refuses fails on all ranks.
#include "gpu/gpu_training.hpp"

#include <algorithm>
#include <cmath>

#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/device.hpp"
#include "conformance/moe_gradients.hpp"
#include "conformance/moe_refusal.hpp"

namespace distmoe::gpu {
namespace {

using conformance::BackwardForm;
using conformance::DeviceCall;
using conformance::DeviceGradients;
using conformance::expect_error;
using conformance::GradientValues;
using conformance::MoeProblem;
using conformance::outcome_of;
using conformance::RankCall;
using conformance::RankGradients;
using conformance::RoutePattern;
using conformance::why_skipped;

/// Ranks on these devices.
class CudaTraining : public testing::TestWithParam<Devices> {
 protected:
  void SetUp() override {
    if (const std::string reason = why_skipped(cuda_case(GetParam())); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
  }
};

std::string ranks_name(const testing::TestParamInfo<Devices>& ranks) {
  std::string name = "on_";
  for (const int device : ranks.param) name += std::to_string(device);
  return name;
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaTraining,
                         testing::Values(Devices{0}, Devices{0, 0}, Devices{0, 0, 0},
                                         Devices{0, 0, 0, 0}, Devices{0, 1}),
                         ranks_name);

constexpr conformance::MoeShape kShape{
    .num_tokens = 120, .hidden_dim = 128, .intermediate_dim = 128, .num_experts = 9, .top_k = 4};

/// Room for a quarter of the routes, not for all.
TEST_P(CudaTraining, AGraphSavesInOneReplayAndComputesAgainInTheNext) {
  const MoeProblem full = conformance::make_problem(kShape, RoutePattern::kDistinct, 21);
  MoeProblem few = full;
  for (std::size_t route = 0; route < few.ids.size(); ++route) {
    if (route % 4 != 0) few.ids[route] = -1;
  }
  const std::vector<BF16> dy = conformance::make_dy(full, 22);
  const Devices& devices = GetParam();
  const BackwardForm form{.slot_factor = 0.75};
  const GpuRun run = training_run(kShape.num_tokens, devices, form);
  on_every_rank(full, run, [&](Context& context, DeviceCall& call, Communicator& group) {
    const int device = devices[static_cast<std::size_t>(context.rank())];
    const cuda::DeviceScope scope(device);
    const Stream stream(device);
    const RankGradients host(full, dy, form, run.counts, context.rank());
    const DeviceGradients gradients(host, device);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    DISTMOE_CUDA_CHECK(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
    train(context, call, gradients, stream.get());
    DISTMOE_CUDA_CHECK(cudaStreamEndCapture(stream.get(), &graph));
    DISTMOE_CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    const auto run_one = [&](const MoeProblem& problem, bool replays) {
      const RankCall packed = conformance::pack_rank(problem, {}, run.counts, context.rank());
      call.x.upload(packed.x), call.ids.upload(packed.ids), call.scores.upload(packed.scores);
      gradients.bring();
      group.barrier(std::chrono::seconds(60));
      if (replays) {
        DISTMOE_CUDA_CHECK(cudaGraphLaunch(executable, stream.get()));
        DISTMOE_CUDA_CHECK(cudaStreamSynchronize(stream.get()));
      } else {
        train(context, call, gradients);
      }
      context.check();
      return fetched(problem, host, gradients);
    };
    const GradientValues of_few = run_one(few, false);
    EXPECT_FALSE(context.last_call().is_recomputed);
    const GradientValues of_full = run_one(full, false);
    EXPECT_TRUE(context.last_call().is_recomputed);
    for (const bool is_few : {true, false, false, true}) {
      const GradientValues again = run_one(is_few ? few : full, true);
      EXPECT_EQ(conformance::first_difference(is_few ? of_few : of_full, again), "");
      EXPECT_EQ(context.last_call().is_recomputed, !is_few);
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
  });
}

TEST_P(CudaTraining, TheBackwardOfAFailedForwardFailsAndAddsNothing) {
  const MoeProblem problem = conformance::make_problem(kShape, RoutePattern::kDistinct, 23);
  MoeProblem bad = problem;
  bad.ids[5] = kShape.num_experts;
  const std::vector<BF16> dy = conformance::make_dy(problem, 24);
  const Devices& devices = GetParam();
  for (const bool accumulates : {false, true}) {
    SCOPED_TRACE(accumulates ? "added" : "fresh");
    const BackwardForm form{.accumulates = accumulates, .initial = 3.0, .slot_factor = 4.0};
    const GpuRun run = training_run(kShape.num_tokens, devices, form);
    on_every_rank(problem, run, [&](Context& context, DeviceCall& call, Communicator&) {
      const int device = devices[static_cast<std::size_t>(context.rank())];
      const GradientValues good = trained(context, call, {problem, dy, form, run});

      const RankGradients bad_host(bad, dy, form, run.counts, context.rank());
      const DeviceGradients bad_gradients(bad_host, device);
      const RankCall packed = conformance::pack_rank(bad, {}, run.counts, context.rank());
      const DeviceCall bad_call(packed, device);
      train(context, bad_call, bad_gradients);
      expect_error(outcome_of([&] { context.check(); }), ErrorCode::kInvalidArgument,
                   {"call 3", "topk_ids[1, 1] of rank 0"});
      bad_gradients.fetch();
      if (!accumulates) {
        EXPECT_TRUE(bad_host.is_of_a_failed_call(BackendKind::kCuda));
      } else {
        constexpr float kOfAnotherRank = -7.0F;
        GradientValues after(problem);
        for (auto* values : {&after.x, &after.scores, &after.gate, &after.up, &after.down}) {
          std::ranges::fill(*values, kOfAnotherRank);
        }
        bad_host.copy_to(after);
        const auto is_nan = [](float value) {
          return std::isnan(value) || value == kOfAnotherRank;
        };
        EXPECT_TRUE(std::ranges::all_of(after.x, is_nan));
        EXPECT_TRUE(std::ranges::all_of(after.scores, is_nan));
        for (const auto* weights : {&after.gate, &after.up, &after.down}) {
          EXPECT_TRUE(std::ranges::all_of(
              *weights, [](float value) { return value == 3.0F || value == kOfAnotherRank; }));
        }
      }

      EXPECT_EQ(
          conformance::first_difference(good, trained(context, call, {problem, dy, form, run})),
          "");
    });
  }
}

/// The host that refused still has its saved forward, the others have used theirs up.
TEST_P(CudaTraining, ABackwardThatOneHostRefusesFailsOnAllAndAfterAResetAllIsWell) {
  const MoeProblem problem = conformance::make_problem(kShape, RoutePattern::kDistinct, 25);
  const std::vector<BF16> dy = conformance::make_dy(problem, 26);
  const Devices& devices = GetParam();
  const int refusing = static_cast<int>(devices.size()) - 1;
  const BackwardForm form{.slot_factor = 4.0};
  const GpuRun run = training_run(kShape.num_tokens, devices, form);
  on_every_rank(problem, run, [&](Context& context, DeviceCall& call, Communicator&) {
    const int device = devices[static_cast<std::size_t>(context.rank())];
    const GradientValues good = trained(context, call, {problem, dy, form, run});

    const RankGradients refused_host(problem, dy, form, run.counts, context.rank());
    const DeviceGradients refused(refused_host, device);
    SavedForward saved =
        saving_routed_experts(context, call.input(), call.weights(), call.y.view());
    TensorView given = refused.dy();
    if (context.rank() == refusing) given.dtype = DType::kF16;
    const conformance::Outcome outcome = outcome_of([&] {
      routed_experts_backward(context, std::move(saved), given, call.weights(),
                              refused.destinations());
      context.check();
    });
    refused.fetch();
    if (context.rank() == refusing) {
      expect_error(outcome, ErrorCode::kInvalidArgument, {"call 4", "dy", "f16"});
      EXPECT_TRUE(refused_host.is_untouched());
    } else {
      expect_error(outcome, ErrorCode::kInvalidArgument,
                   {"rank " + std::to_string(refusing) + " refused", "call 4"});
      EXPECT_TRUE(refused_host.is_of_a_failed_call(BackendKind::kCuda));
    }

    saved = {};
    context.reset();
    EXPECT_EQ(conformance::first_difference(good, trained(context, call, {problem, dy, form, run})),
              "");
  });
}

}  // namespace
}  // namespace distmoe::gpu
