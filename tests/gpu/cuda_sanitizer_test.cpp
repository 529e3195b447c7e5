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

void run_with_split_barriers(const MoeShape& shape, const Devices& devices, Combine combine) {
  MoeProblem problem = conformance::make_problem(shape, RoutePattern::kMixed, 16);
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
