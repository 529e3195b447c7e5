// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a replayed graph gives the bits of the call, with whatever lies in its inputs then, in
// any order of graphs, and reports faults as a call does.
#include "gpu/gpu_ranks.hpp"

#include <memory>

#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/device.hpp"
#include "conformance/moe_oracle.hpp"
#include "conformance/moe_refusal.hpp"

namespace distmoe::gpu {
namespace {

using conformance::DeviceCall;
using conformance::MoeProblem;
using conformance::RankCall;
using conformance::RoutePattern;
using conformance::TokenCounts;

class CudaGraph : public GpuTest {};

/// A call as a graph.
class CapturedCall {
 public:
  CapturedCall(Context& context, DeviceCall& call, const Stream& stream)
      : call_(call), stream_(stream.get()) {
    cudaGraph_t graph = nullptr;
    DISTMOE_CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    routed_experts(context, call.input(), call.weights(), call.y.view(), {.stream = stream_});
    DISTMOE_CUDA_CHECK(cudaStreamEndCapture(stream_, &graph));
    DISTMOE_CUDA_CHECK(cudaGraphInstantiate(&executable_, graph, 0));
    DISTMOE_CUDA_CHECK(cudaGraphDestroy(graph));
  }
  ~CapturedCall() { cudaGraphExecDestroy(executable_); }
  CapturedCall(const CapturedCall&) = delete;
  CapturedCall& operator=(const CapturedCall&) = delete;

  std::vector<BF16> replay() const {
    if (call_.y.buffer().size() > 0) {
      DISTMOE_CUDA_CHECK(
          cudaMemsetAsync(call_.y.buffer().data(), 0xFF, call_.y.buffer().size(), stream_));
    }
    DISTMOE_CUDA_CHECK(cudaGraphLaunch(executable_, stream_));
    DISTMOE_CUDA_CHECK(cudaStreamSynchronize(stream_));
    return call_.y_rows();
  }

 private:
  DeviceCall& call_;
  cudaStream_t stream_;
  cudaGraphExec_t executable_ = nullptr;
};

using Adjust = std::function<void(Config&)>;

/// Ranks on all devices, both ways to combine and all ways to launch.
void for_each_form(const std::function<void(const Devices&, const Adjust&)>& body) {
  const auto run = [&](const Devices& devices, Combine combine, const LaunchForm& form) {
    SCOPED_TRACE(name_of(devices) + (combine == Combine::kPerRank ? ", per_rank, " : ", ") +
                 form.name);
    body(devices, [&](Config& config) {
      config.combine = combine;
      form.apply(config);
    });
  };
  for (const Combine combine : {Combine::kPerRoute, Combine::kPerRank}) {
    for (const Devices& devices : all_devices()) {
      for (const LaunchForm& form : launch_forms()) run(devices, combine, form);
    }
  }
}

/// Three graphs of different T on one context, replayed in an order that repeats and returns, with
/// eager calls between them.
TEST_F(CudaGraph, SeveralGraphsReplayInAnyOrder) {
  for_each_form([](const Devices& devices, const Adjust& adjust) {
    const auto ranks = static_cast<int>(devices.size());
    std::vector<MoeProblem> problems;
    std::vector<TokenCounts> counts;
    for (const std::int64_t tokens : {200, 13, 0}) {
      problems.push_back(conformance::make_problem({200, 256, 128, 8, 4}, RoutePattern::kMixed, 4));
      problems.back().shape.num_tokens = tokens;
      counts.push_back(conformance::ragged_split(tokens, ranks, 2));
    }
    const GpuRun run{.devices = devices, .counts = counts.front(), .adjust = [&](Config& config) {
                       config.max_tokens = 200;
                       adjust(config);
                     }};
    on_every_rank(problems[0], run, [&](Context& context, DeviceCall&, Communicator& group) {
      const int device = devices[static_cast<std::size_t>(context.rank())];
      const cuda::DeviceScope scope(device);
      const Stream stream(device);
      DISTMOE_CUDA_CHECK(cudaStreamSynchronize(stream.get()));
      std::vector<std::unique_ptr<DeviceCall>> calls;
      std::vector<std::unique_ptr<CapturedCall>> graphs;
      std::vector<std::vector<BF16>> eager;
      for (std::size_t i = 0; i < problems.size(); ++i) {
        const RankCall host = conformance::pack_rank(problems[i], {}, counts[i], context.rank());
        calls.push_back(std::make_unique<DeviceCall>(host, device));
        routed_experts(context, calls[i]->input(), calls[i]->weights(), calls[i]->y.view());
        context.check();
        eager.push_back(calls[i]->y_rows());
        graphs.push_back(std::make_unique<CapturedCall>(context, *calls[i], stream));
      }
      group.barrier(std::chrono::seconds(60));
      for (const std::size_t i : {0, 1, 1, 2, 0, 2, 1, 0}) {
        ASSERT_EQ(conformance::first_difference(eager[i], graphs[i]->replay(), 256), "") << i;
        routed_experts(context, calls[1]->input(), calls[1]->weights(), calls[1]->y.view());
        context.check();
        ASSERT_EQ(conformance::first_difference(eager[1], calls[1]->y_rows(), 256), "");
      }
    });
  });
}

/// New ids, scores and activations in the buffers that the graph reads; then an id that is none,
/// and the first ones again.
TEST_F(CudaGraph, AReplayReadsItsInputsAnewAndReportsTheirFaults) {
  constexpr std::int64_t kTokens = 32;  // few enough that combine may meet the peers
  for_each_form([](const Devices& devices, const Adjust& adjust) {
    const TokenCounts counts = conformance::even_split(kTokens, static_cast<int>(devices.size()));
    const MoeProblem first =
        conformance::make_problem({kTokens, 128, 64, 9, 3}, RoutePattern::kMixed, 5);
    MoeProblem second = first;
    const MoeProblem other =
        conformance::make_problem({kTokens, 128, 64, 9, 3}, RoutePattern::kDistinct, 6);
    second.x = other.x, second.ids = other.ids, second.scores = other.scores;
    MoeProblem bad = second;
    bad.ids[8] = 9;
    const GpuRun run{.devices = devices, .counts = counts, .adjust = adjust};
    RowsOfRanks y1(devices.size()), y2(devices.size()), y3(devices.size());
    on_every_rank(first, run, [&](Context& context, DeviceCall& call, Communicator& group) {
      const int device = devices[static_cast<std::size_t>(context.rank())];
      const cuda::DeviceScope scope(device);
      const Stream stream(device);
      const CapturedCall graph(context, call, stream);
      const auto replay = [&](const MoeProblem& problem) {
        const RankCall host = conformance::pack_rank(problem, {}, counts, context.rank());
        call.x.upload(host.x), call.ids.upload(host.ids), call.scores.upload(host.scores);
        group.barrier(std::chrono::seconds(60));
        return graph.replay();
      };
      y1.put(context.rank(), replay(first));
      context.check();
      y2.put(context.rank(), replay(second));
      context.check();
      EXPECT_TRUE(all_nan(replay(bad)));
      // The number of the call that was captured, and of eager ones what the host counts.
      conformance::expect_error(conformance::outcome_of([&] { context.check(); }),
                                ErrorCode::kInvalidArgument,
                                {"call 1:", "topk_ids[2, 2] of rank 0", "is 9"});
      routed_experts(context, call.input(), call.weights(), call.y.view());
      conformance::expect_error(conformance::outcome_of([&] { context.check(); }),
                                ErrorCode::kInvalidArgument, {"call 2:", "is 9"});
      y3.put(context.rank(), replay(first));
      context.check();
    });
    EXPECT_EQ(conformance::first_violation(first, y1.all()), "");
    EXPECT_EQ(conformance::first_violation(second, y2.all()), "");
    EXPECT_EQ(conformance::first_difference(y1.all(), y3.all(), 128), "");
  });
}

// A capture of a blocking stream is found before it is harmed; of others by the refused allocation.
TEST_F(CudaGraph, CreationInsideACaptureIsRefused) {
  const MoeProblem problem =
      conformance::make_problem({8, 64, 32, 4, 2}, RoutePattern::kDistinct, 1);
  const Config config = conformance::config_of(problem, cuda_case({0}), {}, 8);
  for (const unsigned flags : {cudaStreamDefault, cudaStreamNonBlocking}) {
    cudaStream_t stream = nullptr;
    DISTMOE_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, flags));
    DISTMOE_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    conformance::expect_error(
        conformance::outcome_of([&] { Context::create(config, {.backend = BackendKind::kCuda}); }),
        ErrorCode::kUnsupported, {"CUDA graph"});
    cudaGraph_t graph = nullptr;
    const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
    if (flags == cudaStreamDefault) {
      EXPECT_EQ(ended, cudaSuccess);
    }
    cudaGetLastError();
    if (graph != nullptr) cudaGraphDestroy(graph);
    DISTMOE_CUDA_CHECK(cudaStreamDestroy(stream));
    EXPECT_NO_THROW(Context::create(config, {.backend = BackendKind::kCuda}));
  }
}

}  // namespace
}  // namespace distmoe::gpu
