// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the CUDA backend computes what the CPU backend specifies: the same rows in the same
// order, outputs within the tolerance of the same precision, the same bits run after run and in a
// graph, and faults that every rank reports alike. Ranks are threads, on one device or on several.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <optional>

#include "backend/backend.hpp"
#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/device.hpp"
#include "conformance/moe_oracle.hpp"
#include "conformance/moe_runner.hpp"
#include "plan/expert_partition.hpp"

namespace distmoe {
namespace {

using conformance::CallForm;
using conformance::MoeProblem;
using conformance::MoeShape;
using conformance::PackedTensor;
using conformance::RankCall;
using conformance::RoutePattern;
using conformance::TokenCounts;

/// The devices of the ranks.
using Devices = std::vector<int>;

/// A host tensor's copy on a device, with the same shape and strides.
class DeviceTensor {
 public:
  DeviceTensor(const PackedTensor& host, int device)
      : buffer_(host.bytes().size(), device), view_(host.view()) {
    if (!view_.is_given()) return;
    buffer_.upload(host.bytes().data(), host.bytes().size());
    const auto offset =
        view_.data == nullptr ? 0 : static_cast<std::byte*>(view_.data) - host.bytes().data();
    view_.data = static_cast<std::byte*>(buffer_.data()) + offset;
    view_.device = {DeviceType::kCuda, device};
  }
  const TensorView& view() const { return view_; }
  const cuda::DeviceBuffer& buffer() const { return buffer_; }

 private:
  cuda::DeviceBuffer buffer_;
  TensorView view_;
};

/// One rank's call with everything on its device.
struct DeviceCall {
  DeviceTensor x, ids, scores, w13, w2, bias13, bias2, y;

  DeviceCall(const RankCall& call, int device)
      : x(call.x, device),
        ids(call.ids, device),
        scores(call.scores, device),
        w13(call.w13, device),
        w2(call.w2, device),
        bias13(call.bias13, device),
        bias2(call.bias2, device),
        y(call.y, device) {}
  RoutedInput input() const { return {x.view(), ids.view(), scores.view()}; }
  ExpertWeights weights() const { return {w13.view(), w2.view(), bias13.view(), bias2.view()}; }
  /// y without gaps between its rows.
  std::vector<BF16> y_rows() const {
    std::vector<std::byte> bytes(y.buffer().size());
    y.buffer().download(bytes.data(), bytes.size());
    const TensorView& view = y.view();
    const auto offset =
        static_cast<std::byte*>(view.data) - static_cast<std::byte*>(y.buffer().data());
    std::vector<BF16> rows;
    for (std::int64_t token = 0; token < view.shape[0]; ++token) {
      const auto* row =
          reinterpret_cast<const BF16*>(bytes.data() + offset) + token * view.strides[0];
      rows.insert(rows.end(), row, row + view.shape[1]);
    }
    return rows;
  }
};

conformance::MoeCase cuda_case(const Devices& devices) {
  return {.backend = BackendKind::kCuda, .ranks = static_cast<int>(devices.size())};
}

using RankBody = std::function<void(Context&, DeviceCall&, Communicator*)>;

/// Makes a context and a call on every rank and hands them to `body`.
void on_every_rank(const MoeProblem& problem, const Devices& devices, const TokenCounts& counts,
                   const CallForm& form, const RankBody& body,
                   const std::function<void(Config&)>& adjust = {}) {
  const auto max_tokens = std::max<std::int64_t>(1, *std::ranges::max_element(counts));
  Config config = conformance::config_of(problem, cuda_case(devices), form, max_tokens);
  config.timeout = std::chrono::seconds(20);
  if (adjust) adjust(config);
  run_thread_group(
      static_cast<int>(devices.size()), [&](const std::shared_ptr<Communicator>& group) {
        const int rank = group->rank();
        const int device = devices[static_cast<std::size_t>(rank)];
        Context context =
            Context::create(config, group, {.backend = BackendKind::kCuda, .device = device});
        const RankCall host = conformance::pack_rank(problem, form, counts, rank);
        DeviceCall call(host, device);
        body(context, call, group.get());
        group->barrier(std::chrono::seconds(60));
      });
}

std::vector<BF16> run_cuda(const MoeProblem& problem, const Devices& devices,
                           const TokenCounts& counts, const CallForm& form = {},
                           const std::function<void(Config&)>& adjust = {}) {
  std::vector<std::vector<BF16>> rows(devices.size());
  on_every_rank(
      problem, devices, counts, form,
      [&](Context& context, DeviceCall& call, Communicator*) {
        routed_experts(context, call.input(), call.weights(), call.y.view());
        context.check();
        rows[static_cast<std::size_t>(context.rank())] = call.y_rows();
      },
      adjust);
  std::vector<BF16> y;
  for (const auto& part : rows) y.insert(y.end(), part.begin(), part.end());
  return y;
}

std::vector<Devices> all_devices() {
  std::vector<Devices> result = {{0}, {0, 0}, {0, 0, 0}, {0, 0, 0, 0}};
  if (cuda::device_count() > 1) result.insert(result.end(), {{0, 1}, {1, 0}, {0, 1, 0}});
  return result;
}

class CudaForward : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = cuda::why_unavailable(); !reason.empty()) {
      GTEST_SKIP() << "no CUDA device: " << reason;
    }
  }
};

void expect_within_tolerance(const MoeProblem& problem, const CallForm& form = {}) {
  for (const Devices& devices : all_devices()) {
    const auto ranks = static_cast<int>(devices.size());
    SCOPED_TRACE(testing::Message() << ranks << " ranks, last on device " << devices.back());
    const TokenCounts counts = conformance::ragged_split(problem.shape.num_tokens, ranks, 5);
    EXPECT_EQ(conformance::first_violation(problem, run_cuda(problem, devices, counts, form)), "");
  }
}

TEST_F(CudaForward, AgreesWithTheOracleOnManyShapes) {
  for (const MoeShape& shape :
       {MoeShape{1, 64, 32, 4, 2}, MoeShape{63, 192, 192, 8, 4}, MoeShape{65, 256, 72, 5, 3},
        MoeShape{90, 384, 136, 16, 8}, MoeShape{300, 128, 64, 61, 6}, MoeShape{40, 64, 64, 512, 10},
        MoeShape{1000, 64, 32, 3, 1}, MoeShape{3, 1536, 704, 4, 4}}) {
    SCOPED_TRACE(testing::Message() << "T=" << shape.num_tokens << " D=" << shape.hidden_dim
                                    << " F=" << shape.intermediate_dim << " E=" << shape.num_experts
                                    << " K=" << shape.top_k);
    expect_within_tolerance(conformance::make_problem(shape, RoutePattern::kDistinct, 3));
  }
}

TEST_F(CudaForward, AgreesOnEveryRoutePattern) {
  for (const RoutePattern pattern :
       {RoutePattern::kMixed, RoutePattern::kOneExpert, RoutePattern::kAllDisabled}) {
    expect_within_tolerance(conformance::make_problem({260, 128, 64, 12, 4}, pattern, 7));
  }
}

TEST_F(CudaForward, AgreesOnEveryFormOfTheArguments) {
  MoeProblem problem = conformance::make_problem({130, 128, 96, 7, 3}, RoutePattern::kMixed, 11);
  conformance::add_biases(problem, 12);
  problem.round_scores();
  problem.round_biases();
  problem.activation = Activation::kSwiGLUClamped;
  for (const auto w13 : {conformance::W13Form::kConcatenated, conformance::W13Form::kInterleaved,
                         conformance::W13Form::kHalves}) {
    expect_within_tolerance(problem, {.id_dtype = DType::kI64,
                                      .score_dtype = DType::kBF16,
                                      .bias_dtype = DType::kBF16,
                                      .w13 = w13});
  }
}

TEST_F(CudaForward, RowsPerRankAndExpertAreThoseOfTheCpu) {
  const MoeProblem problem =
      conformance::make_problem({333, 64, 32, 21, 5}, RoutePattern::kMixed, 2);
  for (const Devices& devices : all_devices()) {
    const auto ranks = static_cast<int>(devices.size());
    const TokenCounts counts = conformance::ragged_split(333, ranks, 1);
    CallStatistics expected;
    conformance::MoeCase cpu{.ranks = ranks};
    const Config config =
        conformance::config_of(problem, cpu, {}, *std::ranges::max_element(counts));
    std::mutex mutex;
    run_thread_group(ranks, [&](const std::shared_ptr<Communicator>& group) {
      Context context = conformance::make_context(config, cpu, group);
      RankCall call = conformance::pack_rank(problem, {}, counts, group->rank());
      routed_experts(context, call.input, call.weights, call.y_view());
      const std::scoped_lock lock(mutex);
      expected = context.last_call();
    });
    on_every_rank(problem, devices, counts, {},
                  [&](Context& context, DeviceCall& call, Communicator*) {
                    routed_experts(context, call.input(), call.weights(), call.y.view());
                    const CallStatistics actual = context.last_call();
                    EXPECT_EQ(actual.rows_per_rank, expected.rows_per_rank);
                    EXPECT_EQ(actual.rows_per_expert, expected.rows_per_expert);
                  });
  }
}

TEST_F(CudaForward, FortyRunsGiveTheSameBits) {
  const MoeProblem problem =
      conformance::make_problem({500, 256, 128, 16, 8}, RoutePattern::kMixed, 9);
  for (const Devices& devices : all_devices()) {
    const TokenCounts counts = conformance::even_split(500, static_cast<int>(devices.size()));
    on_every_rank(
        problem, devices, counts, {}, [&](Context& context, DeviceCall& call, Communicator*) {
          std::vector<BF16> first;
          for (int run = 0; run < 40; ++run) {
            routed_experts(context, call.input(), call.weights(), call.y.view());
            context.check();
            const std::vector<BF16> y = call.y_rows();
            if (run == 0) first = y;
            EXPECT_EQ(conformance::first_difference(first, y, problem.shape.hidden_dim), "");
          }
        });
  }
}

TEST_F(CudaForward, AReplayedGraphGivesTheBitsOfTheCall) {
  const MoeProblem problem =
      conformance::make_problem({200, 256, 128, 8, 4}, RoutePattern::kMixed, 4);
  for (const Devices& devices : all_devices()) {
    const TokenCounts counts = conformance::even_split(200, static_cast<int>(devices.size()));
    on_every_rank(
        problem, devices, counts, {}, [&](Context& context, DeviceCall& call, Communicator* group) {
          routed_experts(context, call.input(), call.weights(), call.y.view());
          context.check();
          const std::vector<BF16> eager = call.y_rows();
          const cuda::DeviceScope scope(devices[static_cast<std::size_t>(context.rank())]);
          cudaStream_t stream = nullptr;
          cudaGraph_t graph = nullptr;
          cudaGraphExec_t executable = nullptr;
          DISTMOE_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
          DISTMOE_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
          routed_experts(context, call.input(), call.weights(), call.y.view(), {.stream = stream});
          DISTMOE_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
          DISTMOE_CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
          group->barrier(std::chrono::seconds(60));
          for (int replay = 0; replay < 3; ++replay) {
            if (call.y.view().num_elements() > 0) {
              DISTMOE_CUDA_CHECK(
                  cudaMemsetAsync(call.y.buffer().data(), 0xFF, call.y.buffer().size(), stream));
            }
            DISTMOE_CUDA_CHECK(cudaGraphLaunch(executable, stream));
            DISTMOE_CUDA_CHECK(cudaStreamSynchronize(stream));
            context.check();
            EXPECT_EQ(conformance::first_difference(eager, call.y_rows(), problem.shape.hidden_dim),
                      "");
          }
          cudaGraphExecDestroy(executable);
          cudaGraphDestroy(graph);
          cudaStreamDestroy(stream);
        });
  }
}

ErrorCode code_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kInternal;
}

TEST_F(CudaForward, ABadIdFailsOnEveryRankAndTheNextCallWorks) {
  const MoeProblem good =
      conformance::make_problem({100, 128, 64, 8, 2}, RoutePattern::kDistinct, 6);
  MoeProblem bad = good;
  bad.ids[7] = 8;
  for (const Devices& devices : all_devices()) {
    const auto ranks = static_cast<int>(devices.size());
    const TokenCounts counts = conformance::even_split(100, ranks);
    std::vector<std::vector<BF16>> rows(devices.size());
    on_every_rank(
        good, devices, counts, {}, [&](Context& context, DeviceCall& call, Communicator*) {
          const RankCall bad_host = conformance::pack_rank(bad, {}, counts, context.rank());
          DeviceCall bad_call(bad_host, devices[static_cast<std::size_t>(context.rank())]);
          routed_experts(context, bad_call.input(), bad_call.weights(), bad_call.y.view());
          EXPECT_EQ(code_of([&] { context.check(); }), ErrorCode::kInvalidArgument);
          for (const BF16 value : bad_call.y_rows()) EXPECT_TRUE(std::isnan(to_float(value)));
          EXPECT_NO_THROW(context.check());
          routed_experts(context, call.input(), call.weights(), call.y.view());
          context.check();
          rows[static_cast<std::size_t>(context.rank())] = call.y_rows();
        });
    std::vector<BF16> y;
    for (const auto& part : rows) y.insert(y.end(), part.begin(), part.end());
    EXPECT_EQ(conformance::first_violation(good, y), "");
  }
}

TEST_F(CudaForward, ExceededCapacityFailsOnEveryRank) {
  const MoeProblem crowded =
      conformance::make_problem({90, 64, 32, 6, 2}, RoutePattern::kOneExpert, 6);
  for (const Devices& devices : all_devices()) {
    const auto ranks = static_cast<int>(devices.size());
    if (ranks == 1) continue;
    const auto tight = [](Config& config) {
      config.device_scratch_capacity_factor = 1.0;
      config.distinct_experts = false;
    };
    on_every_rank(
        crowded, devices, conformance::even_split(90, ranks), {},
        [&](Context& context, DeviceCall& call, Communicator*) {
          routed_experts(context, call.input(), call.weights(), call.y.view());
          EXPECT_EQ(code_of([&] { context.check(); }), ErrorCode::kCapacityExceeded);
          for (const BF16 value : call.y_rows()) EXPECT_TRUE(std::isnan(to_float(value)));
        },
        tight);
  }
}

// A rank whose host refuses its arguments throws; its peers hear of it from check(), and all go on.
TEST_F(CudaForward, ARefusedCallFailsOnEveryRankAndTheNextCallWorks) {
  const MoeProblem problem =
      conformance::make_problem({80, 128, 64, 8, 2}, RoutePattern::kDistinct, 8);
  for (const Devices& devices : all_devices()) {
    const auto ranks = static_cast<int>(devices.size());
    const TokenCounts counts = conformance::even_split(80, ranks);
    std::vector<std::vector<BF16>> rows(devices.size());
    on_every_rank(
        problem, devices, counts, {}, [&](Context& context, DeviceCall& call, Communicator*) {
          RoutedInput input = call.input();
          if (context.rank() == ranks - 1) {
            input.x_TD.dtype = DType::kF16;
            EXPECT_EQ(
                code_of([&] { routed_experts(context, input, call.weights(), call.y.view()); }),
                ErrorCode::kInvalidArgument);
          } else {
            routed_experts(context, input, call.weights(), call.y.view());
            EXPECT_EQ(code_of([&] { context.check(); }), ErrorCode::kInvalidArgument);
            for (const BF16 value : call.y_rows()) EXPECT_TRUE(std::isnan(to_float(value)));
          }
          routed_experts(context, call.input(), call.weights(), call.y.view());
          context.check();
          rows[static_cast<std::size_t>(context.rank())] = call.y_rows();
        });
    std::vector<BF16> y;
    for (const auto& part : rows) y.insert(y.end(), part.begin(), part.end());
    EXPECT_EQ(conformance::first_violation(problem, y), "");
  }
}

// One rank that cannot make its part is heard by all: none waits for it.
TEST_F(CudaForward, ACreationThatFailsOnOneRankFailsOnAllWithItsCode) {
  const MoeProblem problem =
      conformance::make_problem({8, 64, 32, 4, 2}, RoutePattern::kDistinct, 1);
  const conformance::MoeCase moe_case = cuda_case({0, 0, 0});
  const Config config = conformance::config_of(problem, moe_case, {}, 8);
  run_thread_group(3, [&](const std::shared_ptr<Communicator>& group) {
    const int device = group->rank() == 1 ? cuda::device_count() : 0;
    EXPECT_EQ(code_of([&] {
                Context::create(config, group, {.backend = BackendKind::kCuda, .device = device});
              }),
              ErrorCode::kInvalidArgument);
  });
}

// kernel_choice = fixed promises it for P = 1, 2, 4; today's kernels keep it for every P with
// either choice and any number of SMs, because a tile's shape and place are in no sum.
TEST_F(CudaForward, EveryNumberOfRanksGivesTheSameBits) {
  for (const MoeShape& shape : {MoeShape{700, 384, 136, 9, 4}, MoeShape{64, 1536, 256, 6, 3}}) {
    const MoeProblem problem = conformance::make_problem(shape, RoutePattern::kMixed, 13);
    const std::vector<BF16> first = run_cuda(problem, {0}, {shape.num_tokens});
    for (const KernelChoice choice : {KernelChoice::kTuned, KernelChoice::kFixed}) {
      for (const std::optional<std::int64_t> num_sms : {std::optional<std::int64_t>(), {24}}) {
        for (const Devices& devices : all_devices()) {
          const auto ranks = static_cast<int>(devices.size());
          const TokenCounts counts = conformance::ragged_split(shape.num_tokens, ranks, 3);
          const std::vector<BF16> y = run_cuda(problem, devices, counts, {}, [&](Config& config) {
            config.kernel_choice = choice;
            config.num_sms = num_sms;
          });
          EXPECT_EQ(conformance::first_difference(first, y, shape.hidden_dim), "")
              << ranks << " ranks, last on device " << devices.back() << ", " << num_sms.value_or(0)
              << " SMs, choice " << static_cast<int>(choice);
        }
      }
    }
  }
}

TEST_F(CudaForward, WhatTheBackendCannotDoIsRefused) {
  const MoeProblem problem =
      conformance::make_problem({8, 64, 32, 4, 2}, RoutePattern::kDistinct, 1);
  const auto refused = [&](const std::function<void(Config&)>& adjust) {
    Config config = conformance::config_of(problem, cuda_case({0}), {}, 8);
    adjust(config);
    return code_of([&] { Context::create(config, {.backend = BackendKind::kCuda}); });
  };
  EXPECT_EQ(refused([](Config& c) { c.hidden_dim = 60; }), ErrorCode::kUnsupported);
  EXPECT_EQ(refused([](Config& c) { c.combine = Combine::kPerRank; }), ErrorCode::kUnsupported);
  EXPECT_EQ(refused([](Config& c) { c.inference = false; }), ErrorCode::kUnsupported);
}

// A capture of a blocking stream is found before it is harmed; of others by the refused allocation.
TEST_F(CudaForward, CreationInsideACaptureIsRefused) {
  const MoeProblem problem =
      conformance::make_problem({8, 64, 32, 4, 2}, RoutePattern::kDistinct, 1);
  const Config config = conformance::config_of(problem, cuda_case({0}), {}, 8);
  for (const unsigned flags : {cudaStreamDefault, cudaStreamNonBlocking}) {
    cudaStream_t stream = nullptr;
    DISTMOE_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, flags));
    DISTMOE_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    EXPECT_EQ(code_of([&] { Context::create(config, {.backend = BackendKind::kCuda}); }),
              ErrorCode::kUnsupported);
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

TEST_F(CudaForward, AContextAllocatesItsPlan) {
  const MoeProblem problem =
      conformance::make_problem({64, 64, 32, 4, 2}, RoutePattern::kDistinct, 1);
  on_every_rank(problem, {0}, {64}, {}, [](Context& context, DeviceCall&, Communicator*) {
    EXPECT_EQ(context.allocated_bytes(), context.memory_plan().allocated_bytes);
  });
}

}  // namespace
}  // namespace distmoe
