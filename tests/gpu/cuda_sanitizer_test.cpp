// SPDX-License-Identifier: Apache-2.0
//
// Small calls for compute-sanitizer, which runs the kernels of a device one after the other: the
// barriers of ranks are split into kernels that signal and kernels that wait, ordered by events, so
// that no kernel waits for one that could not start. scripts/gpu_check runs them under its tools.
#include "gpu/gpu_ranks.hpp"

#include <memory>

#include "backend/cuda/cuda_backend.hpp"
#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/device.hpp"
#include "conformance/moe_oracle.hpp"
#include "conformance/moe_refusal.hpp"
#include "runtime/context_impl.hpp"

namespace distmoe::gpu {
namespace {

using conformance::DeviceCall;
using conformance::MoeProblem;
using conformance::MoeShape;
using conformance::RoutePattern;

class CudaSanitizer : public GpuTest {};

class Event {
 public:
  explicit Event(int device) {
    const cuda::DeviceScope scope(device);
    DISTMOE_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
  }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

void run_with_split_barriers(const MoeShape& shape, const Devices& devices, Combine combine,
                             Activation activation = Activation::kSwiGLU) {
  MoeProblem problem = conformance::make_problem(shape, RoutePattern::kMixed, 16);
  problem.activation = activation;
  conformance::add_biases(problem, 17);
  const auto ranks = static_cast<int>(devices.size());
  std::vector<std::unique_ptr<Event>> here;
  for (const int device : devices) here.push_back(std::make_unique<Event>(device));
  const GpuRun run{.devices = devices,
                   .counts = conformance::ragged_split(shape.num_tokens, ranks, 4),
                   .adjust = [&](Config& config) { config.combine = combine; }};
  RowsOfRanks rows(devices.size());
  on_every_rank(problem, run, [&](Context& context, DeviceCall& call, Communicator& group) {
    const auto rank = static_cast<std::size_t>(context.rank());
    auto& backend = dynamic_cast<cuda::CudaBackend&>(*context.impl().backend());
    backend.split_barriers([&](cudaStream_t stream) {
      DISTMOE_CUDA_CHECK(cudaEventRecord(here[rank]->get(), stream));
      group.barrier(std::chrono::seconds(60));
      for (const auto& event : here) DISTMOE_CUDA_CHECK(cudaStreamWaitEvent(stream, event->get()));
      group.barrier(std::chrono::seconds(60));
    });
    for (int repeat = 0; repeat < 2; ++repeat) {
      routed_experts(context, call.input(), call.weights(), call.y.view());
      context.check();
    }
    rows.put(context.rank(), call.y_rows());
    group.barrier(std::chrono::seconds(60));
  });
  EXPECT_EQ(conformance::first_violation(problem, rows.all()), "");
}

/// A call whose ids a device finds wrong, then the right one, on one rank: one launch each.
void run_in_one_launch(const MoeShape& shape, Activation activation, DType id_dtype) {
  MoeProblem problem = conformance::make_problem(shape, RoutePattern::kMixed, 18);
  conformance::add_biases(problem, 19);
  problem.activation = activation;
  conformance::CallForm form;
  form.id_dtype = id_dtype;
  MoeProblem bad = problem;
  bad.ids.front() = shape.num_experts;
  on_every_rank(problem, {.counts = {shape.num_tokens}, .form = form},
                [&](Context& context, DeviceCall& call, Communicator&) {
                  const conformance::RankCall bad_host =
                      conformance::pack_rank(bad, form, {shape.num_tokens}, 0);
                  DeviceCall wrong(bad_host, 0);
                  routed_experts(context, wrong.input(), wrong.weights(), wrong.y.view());
                  conformance::expect_error(conformance::outcome_of([&] { context.check(); }),
                                            ErrorCode::kInvalidArgument, {"topk_ids[0, 0]"});
                  EXPECT_TRUE(all_nan(wrong.y_rows()));
                  for (int repeat = 0; repeat < 2; ++repeat) {
                    routed_experts(context, call.input(), call.weights(), call.y.view());
                    context.check();
                  }
                  EXPECT_EQ(conformance::first_violation(problem, call.y_rows()), "");
                });
}

// The kernel of few rows: routes of one warp and of the block, one token in tiles of its own.
TEST_F(CudaSanitizer, FewRowsOfOneRank) {
  for (const Activation activation : {Activation::kSwiGLU, Activation::kSwiGLUClamped}) {
    run_in_one_launch({1, 136, 72, 5, 3}, activation, DType::kI32);
    run_in_one_launch({9, 136, 72, 5, 3}, activation, DType::kI64);
    run_in_one_launch({40, 136, 72, 5, 3}, activation, DType::kI32);
  }
}

// With peers: the products alone, between the barriers in steps.
TEST_F(CudaSanitizer, FewRowsOfTwoRanks) {
  for (const Activation activation : {Activation::kSwiGLU, Activation::kSwiGLUClamped}) {
    run_with_split_barriers({20, 136, 72, 5, 3}, {0, 0}, Combine::kPerRoute, activation);
  }
}

// Kernels of two devices run side by side under the tools too: here head and end of a call meet the
// peers themselves, publish_route among them.
TEST_F(CudaSanitizer, FewTokensOfTwoGpus) {
  if (cuda::device_count() < 2) GTEST_SKIP() << "needs two GPUs";
  for (const Combine combine : {Combine::kPerRoute, Combine::kPerRank}) {
    for (const Activation activation : {Activation::kSwiGLU, Activation::kSwiGLUClamped}) {
      MoeProblem problem = conformance::make_problem({20, 136, 72, 5, 3}, RoutePattern::kMixed, 20);
      problem.activation = activation;
      const std::vector<BF16> y =
          run_cuda(problem, {.devices = {0, 1}, .counts = {13, 7}, .adjust = [&](Config& config) {
                               config.combine = combine;
                             }});
      EXPECT_EQ(conformance::first_violation(problem, y), "");
    }
  }
}

TEST_F(CudaSanitizer, OneRank) {
  for (const Combine combine : {Combine::kPerRoute, Combine::kPerRank}) {
    run_with_split_barriers({70, 136, 72, 5, 3}, {0}, combine);
  }
}

TEST_F(CudaSanitizer, TwoRanks) {
  for (const Combine combine : {Combine::kPerRoute, Combine::kPerRank}) {
    run_with_split_barriers({70, 136, 72, 5, 3}, {0, 0}, combine);
  }
}

TEST_F(CudaSanitizer, TwoGpus) {
  if (cuda::device_count() < 2) GTEST_SKIP() << "needs two GPUs";
  for (const Combine combine : {Combine::kPerRoute, Combine::kPerRank}) {
    run_with_split_barriers({70, 136, 72, 5, 3}, {0, 1}, combine);
  }
}

}  // namespace
}  // namespace distmoe::gpu
