// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a call that fails on the device fails on every rank: outputs NaN, one error for all at
// check(), and, unless a peer was lost, the next call right. No rank takes for a result what a peer
// never computed.
#include "gpu/gpu_ranks.hpp"

#include <atomic>
#include <thread>

#include "backend/cuda/device.hpp"
#include "conformance/moe_oracle.hpp"
#include "conformance/moe_refusal.hpp"

namespace distmoe::gpu {
namespace {

using conformance::DeviceCall;
using conformance::expect_error;
using conformance::MoeProblem;
using conformance::Outcome;
using conformance::outcome_of;
using conformance::RoutePattern;

class CudaFaults : public GpuTest {};

/// A call that must work, and its rows.
void call_and_keep(Context& context, DeviceCall& call, RowsOfRanks& rows) {
  routed_experts(context, call.input(), call.weights(), call.y.view());
  context.check();
  rows.put(context.rank(), call.y_rows());
}

/// Runs `body` for ranks on all devices, both ways to combine and all ways to launch.
void for_each_form(const MoeProblem& problem,
                   const std::function<void(const GpuRun&, RowsOfRanks&)>& body) {
  const auto run = [&](const Devices& devices, Combine combine, const LaunchForm& form) {
    SCOPED_TRACE(name_of(devices) + (combine == Combine::kPerRank ? ", per_rank, " : ", ") +
                 form.name);
    RowsOfRanks rows(devices.size());
    body({.devices = devices,
          .counts =
              conformance::even_split(problem.shape.num_tokens, static_cast<int>(devices.size())),
          .adjust =
              [&](Config& config) {
                config.combine = combine;
                form.apply(config);
              }},
         rows);
    EXPECT_EQ(conformance::first_violation(problem, rows.all()), "");
  };
  for (const Combine combine : {Combine::kPerRoute, Combine::kPerRank}) {
    for (const Devices& devices : all_devices()) {
      for (const LaunchForm& form : launch_forms()) run(devices, combine, form);
    }
  }
}

TEST_F(CudaFaults, ABadIdFailsOnEveryRankAndTheNextCallWorks) {
  const MoeProblem good =
      conformance::make_problem({24, 128, 64, 8, 2}, RoutePattern::kDistinct, 6);
  for (const std::int64_t id : {std::int64_t{8}, std::int64_t{-2}, std::int64_t{1} << 32}) {
    MoeProblem bad = good;
    bad.ids[7] = id;
    for_each_form(good, [&](GpuRun run, RowsOfRanks& rows) {
      run.form.id_dtype = DType::kI64;
      on_every_rank(good, run, [&](Context& context, DeviceCall& call, Communicator&) {
        const conformance::RankCall bad_host =
            conformance::pack_rank(bad, run.form, run.counts, context.rank());
        DeviceCall bad_call(bad_host, run.devices[static_cast<std::size_t>(context.rank())]);
        routed_experts(context, bad_call.input(), bad_call.weights(), bad_call.y.view());
        expect_error(outcome_of([&] { context.check(); }), ErrorCode::kInvalidArgument,
                     {"call 1", "topk_ids[3, 1] of rank 0", "is " + std::to_string(id), "0 to 7"});
        EXPECT_TRUE(all_nan(bad_call.y_rows()));
        EXPECT_NO_THROW(context.check());
        call_and_keep(context, call, rows);
      });
    });
  }
}

/// What the last rank does to its arguments, and the code that its host refuses them with.
struct Refusal {
  ErrorCode code;
  void (*spoil)(RoutedInput& input);
};
constexpr Refusal kRefusals[] = {
    {ErrorCode::kInvalidArgument, [](RoutedInput& input) { input.x_TD.dtype = DType::kF16; }},
    // Rows that do not begin at multiples of 16 bytes.
    {ErrorCode::kUnsupported, [](RoutedInput& input) { input.x_TD.strides[0] += 4; }}};

// A rank whose host refuses its arguments throws; its peers hear of it from check(), with the same
// code, and all go on.
TEST_F(CudaFaults, ARefusedCallFailsOnEveryRankAndTheNextCallWorks) {
  const MoeProblem problem =
      conformance::make_problem({24, 128, 64, 8, 2}, RoutePattern::kDistinct, 8);
  for (const Refusal& refusal : kRefusals) {
    for_each_form(problem, [&](const GpuRun& run, RowsOfRanks& rows) {
      const auto ranks = static_cast<int>(run.devices.size());
      on_every_rank(problem, run, [&](Context& context, DeviceCall& call, Communicator&) {
        RoutedInput input = call.input();
        const bool is_refused = context.rank() == ranks - 1;
        if (is_refused) refusal.spoil(input);
        const Outcome outcome = outcome_of([&] {
          routed_experts(context, input, call.weights(), call.y.view());
          context.check();
        });
        expect_error(outcome, refusal.code, {"rank " + std::to_string(ranks - 1), "call 1"});
        EXPECT_TRUE(is_refused || all_nan(call.y_rows()));
        call_and_keep(context, call, rows);
      });
    });
  }
}

// Both happen in one call: this rank's arguments are wrong, and a peer does not come to it.
TEST_F(CudaFaults, ARefusedCallDoesNotHideALostPeer) {
  const MoeProblem problem =
      conformance::make_problem({24, 128, 64, 8, 2}, RoutePattern::kDistinct, 8);
  std::vector<Devices> placements = {{0, 0}};
  if (cuda::device_count() > 1) placements.push_back({0, 1});
  for (const Devices& devices : placements) {
    SCOPED_TRACE(name_of(devices));
    const GpuRun run{
        .devices = devices, .counts = conformance::even_split(24, 2), .adjust = [](Config& config) {
          config.timeout = std::chrono::milliseconds(400);
        }};
    on_every_rank(problem, run, [&](Context& context, DeviceCall& call, Communicator&) {
      if (context.rank() == 1) return;
      RoutedInput input = call.input();
      input.x_TD.dtype = DType::kF16;
      expect_error(
          outcome_of([&] { routed_experts(context, input, call.weights(), call.y.view()); }),
          ErrorCode::kInvalidArgument, {"rank 0", "call 1"});
      expect_error(outcome_of([&] { context.check(); }), ErrorCode::kPeerLost,
                   {"rank 1 did not arrive", "400 ms", "call 1"});
    });
  }
}

// Found before anything is enqueued there, so that all ranks can go on.
TEST_F(CudaFaults, AStreamOfAnotherDeviceIsRefusedAndTheNextCallWorks) {
  if (cuda::device_count() < 2) GTEST_SKIP() << "needs two GPUs";
  const MoeProblem problem =
      conformance::make_problem({24, 128, 64, 8, 2}, RoutePattern::kDistinct, 8);
  for (const Devices& devices : {Devices{0}, Devices{0, 1}}) {
    SCOPED_TRACE(name_of(devices));
    RowsOfRanks rows(devices.size());
    on_every_rank(problem,
                  {.devices = devices,
                   .counts = conformance::even_split(24, static_cast<int>(devices.size()))},
                  [&](Context& context, DeviceCall& call, Communicator&) {
                    const Stream foreign(1 - devices[static_cast<std::size_t>(context.rank())]);
                    for (int round = 0; round < 3; ++round) {
                      expect_error(outcome_of([&] {
                                     routed_experts(context, call.input(), call.weights(),
                                                    call.y.view(), {.stream = foreign.get()});
                                   }),
                                   ErrorCode::kInvalidArgument,
                                   {"stream is of CUDA device", "this context's is"});
                      routed_experts(context, call.input(), call.weights(), call.y.view());
                      context.check();
                    }
                    rows.put(context.rank(), call.y_rows());
                  });
    EXPECT_EQ(conformance::first_violation(problem, rows.all()), "");
  }
}

// Each would wait for kernels that stand behind its own: who comes second is told at once, and the
// other one by then or at its timeout.
TEST_F(CudaFaults, OfRanksOfOneDeviceThatShareAStreamTheSecondIsRefusedAtOnce) {
  const MoeProblem problem =
      conformance::make_problem({24, 128, 64, 8, 2}, RoutePattern::kDistinct, 8);
  const Stream shared(0);
  std::atomic<int> refused = 0;
  on_every_rank(
      problem, {.devices = {0, 0}, .counts = {12, 12}},
      [&](Context& context, DeviceCall& call, Communicator&) {
        const Outcome outcome = outcome_of([&] {
          routed_experts(context, call.input(), call.weights(), call.y.view(),
                         {.stream = shared.get()});
          context.check();
        });
        ASSERT_TRUE(outcome.code.has_value());
        if (outcome.message.find("options.stream is also that of a peer") != std::string::npos) {
          ++refused;
          EXPECT_EQ(*outcome.code, ErrorCode::kInvalidArgument);
          EXPECT_LT(outcome.seconds, 10.0);
        }
      });
  EXPECT_EQ(refused, 1);
}

/// Rows of an expert beyond 2^31 are counted, not wrapped into what the plan has.
TEST_F(CudaFaults, MoreRowsThan31BitsCountExceedTheCapacity) {
  constexpr std::int64_t kTopK = 255;
  constexpr std::int64_t kRoutes = (std::int64_t{1} << 31) + 1;
  constexpr std::int64_t kTokens = (kRoutes + kTopK - 1) / kTopK;
  const Config config{.max_tokens = kTokens,
                      .hidden_dim = 8,
                      .intermediate_dim = 8,
                      .top_k = kTopK,
                      .num_experts = kTopK,
                      .max_moe_layers_per_activation_slot = 1,
                      .device_scratch_capacity_factor = 1e-3,
                      .distinct_experts = false,
                      .inference = true};
  const MemoryPlan plan = plan_memory(config, 1, {.backend = BackendKind::kCuda});
  const std::int64_t needed_bytes = plan.allocated_bytes + (std::int64_t{1} << 30);
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  ASSERT_EQ(cudaMemGetInfo(&free_bytes, &total_bytes), cudaSuccess);
  if (static_cast<std::int64_t>(free_bytes) < needed_bytes) {
    GTEST_SKIP() << "needs " << needed_bytes << " bytes of a GPU, " << free_bytes << " are free";
  }
  // One row, one id and one score for all: strides of 0. Bytes of 0 are expert 0, too.
  const auto zeros = [](std::size_t bytes) {
    cuda::DeviceBuffer buffer(bytes, 0);
    const std::vector<std::byte> bytes_of_0(bytes);
    buffer.upload(bytes_of_0.data(), bytes);
    return buffer;
  };
  const cuda::DeviceBuffer row = zeros(4096);
  const cuda::DeviceBuffer weights = zeros(kTopK * 16 * 8 * 2);
  const cuda::DeviceBuffer y(kTokens * 8 * 2, 0);
  using Extents = std::initializer_list<std::int64_t>;
  const auto placed = [](const cuda::DeviceBuffer& buffer, DType dtype, Extents shape,
                         Extents strides) {
    return TensorView::strided(buffer.data(), dtype, shape, strides, {DeviceType::kCuda, 0});
  };
  Context context = Context::create(config, {.backend = BackendKind::kCuda});
  const auto call = [&](std::int64_t tokens) {
    routed_experts(context,
                   {placed(row, DType::kBF16, {tokens, 8}, {0, 1}),
                    placed(row, DType::kI32, {tokens, kTopK}, {0, 0}),
                    placed(row, DType::kF32, {tokens, kTopK}, {0, 0})},
                   {placed(weights, DType::kBF16, {kTopK, 16, 8}, {128, 8, 1}),
                    placed(weights, DType::kBF16, {kTopK, 8, 8}, {64, 8, 1})},
                   placed(y, DType::kBF16, {tokens, 8}, {8, 1}));
    context.check();
  };
  expect_error(outcome_of([&] { call(kTokens); }), ErrorCode::kCapacityExceeded,
               {std::to_string(kTokens * kTopK) + " required"});
  EXPECT_NO_THROW(call(1));
}

// One rank that cannot make its part is heard by all: none waits for it.
TEST_F(CudaFaults, ACreationThatFailsOnOneRankFailsOnAllWithItsCode) {
  const MoeProblem problem =
      conformance::make_problem({8, 64, 32, 4, 2}, RoutePattern::kDistinct, 1);
  const Config config = conformance::config_of(problem, cuda_case({0, 0, 0}), {}, 8);
  run_thread_group(3, [&](const std::shared_ptr<Communicator>& group) {
    const int device = group->rank() == 1 ? cuda::device_count() : 0;
    expect_error(outcome_of([&] {
                   Context::create(config, group,
                                   {.backend = BackendKind::kCuda, .device = device});
                 }),
                 ErrorCode::kInvalidArgument, {"device"});
  });
}

// A rank that comes after the others gave up has no results of theirs and must not pretend so.
TEST_F(CudaFaults, ARankThatComesTooLateFailsToo) {
  const MoeProblem problem =
      conformance::make_problem({24, 128, 64, 9, 3}, RoutePattern::kDistinct, 9);
  std::vector<Devices> placements = {{0, 0}, {0, 0, 0}};
  if (cuda::device_count() > 1) placements.push_back({0, 1});
  const auto come_late = [&](const Devices& devices, const LaunchForm& form) {
    SCOPED_TRACE(name_of(devices) + ", " + form.name);
    const auto ranks = static_cast<int>(devices.size());
    const auto timeout = std::chrono::milliseconds(400);
    const GpuRun run{.devices = devices,
                     .counts = conformance::even_split(24, ranks),
                     .adjust = [&](Config& config) {
                       config.timeout = timeout;
                       form.apply(config);
                     }};
    on_every_rank(problem, run, [&](Context& context, DeviceCall& call, Communicator&) {
      const int late = ranks - 1;
      // The others wait at both barriers of the call.
      if (context.rank() == late) std::this_thread::sleep_for(4 * timeout);
      routed_experts(context, call.input(), call.weights(), call.y.view());
      const Outcome outcome = outcome_of([&] { context.check(); });
      if (context.rank() == late) {
        expect_error(outcome, ErrorCode::kPeerLost, {"gave the call up", "call 1"});
      } else {
        expect_error(outcome, ErrorCode::kPeerLost, {"rank " + std::to_string(late), "400 ms"});
      }
      EXPECT_TRUE(all_nan(call.y_rows()));
      expect_error(
          outcome_of([&] { routed_experts(context, call.input(), call.weights(), call.y.view()); }),
          ErrorCode::kClosed, {});
    });
  };
  for (const Devices& devices : placements) {
    for (const LaunchForm& form : launch_forms()) come_late(devices, form);
  }
}

}  // namespace
}  // namespace distmoe::gpu
