// SPDX-License-Identifier: Apache-2.0
//
// Invariant: over windows that NCCL registered the CUDA backend gives the bits that it gives to
// one rank alone, reports faults alike, and a rank that does not call, dies or stops is named in
// time. Ranks are two processes, which two_ranks_main.cpp starts.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <functional>
#include <thread>

#include "backend/backend.hpp"
#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/device.hpp"
#include "comm/communicator_laws.hpp"
#include "comm/nccl_engine.hpp"
#include "conformance/moe_oracle.hpp"
#include "conformance/moe_runner.hpp"
#include "conformance/placed_call.hpp"

namespace distmoe {
namespace {

using conformance::DeviceCall;
using conformance::MoeProblem;
using conformance::MoeShape;
using conformance::RoutePattern;
using conformance::TokenCounts;
using std::chrono::milliseconds;

constexpr int kRanks = 2;
constexpr milliseconds kPatience{20000};

std::string why_not(int num_gpus) {
  if (const std::string reason = cuda::why_unavailable(); !reason.empty()) return reason;
  if (const std::string reason = nccl_engine_problem(); !reason.empty()) return reason;
  return cuda::device_count() < num_gpus ? "two ranks need two GPUs" : "";
}

class NcclForward : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = why_not(kRanks); !reason.empty()) GTEST_SKIP() << reason;
  }
};

/// This process's communicator. Every case makes its own, so that none inherits a fault.
std::shared_ptr<Communicator> make_group() {
  const auto host = make_tcp_communicator(torchrun_group(), kPatience);
  const int device = host->rank();
  return make_nccl_communicator(host, device, kPatience);
}

Context make_context(const MoeProblem& problem, const std::shared_ptr<Communicator>& group,
                     int device, milliseconds timeout = kPatience,
                     const std::function<void(Config&)>& adjust = {}) {
  const int ranks = group == nullptr ? 1 : group->size();
  Config config = conformance::config_of(problem, {.backend = BackendKind::kCuda, .ranks = ranks},
                                         {}, problem.shape.num_tokens);
  config.timeout = timeout;
  if (adjust) adjust(config);
  return Context::create(config, group, {.backend = BackendKind::kCuda, .device = device});
}

DeviceCall make_call(const MoeProblem& problem, const TokenCounts& counts, int rank, int device) {
  const conformance::RankCall host = conformance::pack_rank(problem, {}, counts, rank);
  return {host, device};
}

/// All of y, computed by one rank on one GPU.
std::vector<BF16> y_of_one_rank(const MoeProblem& problem, int device) {
  Context context = make_context(problem, nullptr, device);
  DeviceCall call = make_call(problem, {problem.shape.num_tokens}, 0, device);
  routed_experts(context, call.input(), call.weights(), call.y.view());
  context.check();
  return call.y_rows();
}

TEST_F(NcclForward, GivesTheBitsOfOneRank) {
  for (const MoeShape& shape :
       {MoeShape{1, 64, 32, 4, 2}, MoeShape{65, 256, 72, 5, 3}, MoeShape{300, 128, 64, 61, 6},
        MoeShape{3, 1536, 704, 4, 4}, MoeShape{500, 256, 128, 16, 8}}) {
    const MoeProblem problem = conformance::make_problem(shape, RoutePattern::kMixed, 3);
    const TokenCounts counts = conformance::ragged_split(shape.num_tokens, kRanks, 5);
    const std::shared_ptr<Communicator> group = make_group();
    const int rank = group->rank();
    const std::vector<BF16> all = y_of_one_rank(problem, rank);
    EXPECT_EQ(conformance::first_violation(problem, all), "");
    Context context = make_context(problem, group, rank);
    DeviceCall call = make_call(problem, counts, rank, rank);
    routed_experts(context, call.input(), call.weights(), call.y.view());
    context.check();
    const auto first = all.begin() + (rank == 0 ? 0 : counts[0]) * shape.hidden_dim;
    const std::vector<BF16> expected(
        first, first + counts[static_cast<std::size_t>(rank)] * shape.hidden_dim);
    EXPECT_EQ(conformance::first_difference(expected, call.y_rows(), shape.hidden_dim), "");
    EXPECT_EQ(context.allocated_bytes(), context.memory_plan().allocated_bytes);
    group->barrier(kPatience);
  }
}

TEST_F(NcclForward, AReplayedGraphGivesTheBitsOfTheCall) {
  const MoeProblem problem =
      conformance::make_problem({200, 256, 128, 8, 4}, RoutePattern::kMixed, 4);
  const TokenCounts counts = conformance::even_split(200, kRanks);
  const std::shared_ptr<Communicator> group = make_group();
  const cuda::DeviceScope scope(group->rank());
  Context context = make_context(problem, group, group->rank());
  DeviceCall call = make_call(problem, counts, group->rank(), group->rank());
  routed_experts(context, call.input(), call.weights(), call.y.view());
  context.check();
  const std::vector<BF16> eager = call.y_rows();
  cuda::DeviceGraph graph(group->rank(), [&](void* stream) {
    routed_experts(context, call.input(), call.weights(), call.y.view(), {.stream = stream});
  });
  for (int replay = 0; replay < 20; ++replay) {
    DISTMOE_CUDA_CHECK(cudaMemset(call.y.buffer().data(), 0xFF, call.y.buffer().size()));
    DISTMOE_CUDA_CHECK(cudaDeviceSynchronize());
    graph.replay();
    context.check();
    EXPECT_EQ(conformance::first_difference(eager, call.y_rows(), 256), "");
  }
  group->barrier(kPatience);
}

TEST_F(NcclForward, ABadIdFailsOnEveryRankAndTheNextCallWorks) {
  const MoeProblem good =
      conformance::make_problem({100, 128, 64, 8, 2}, RoutePattern::kDistinct, 6);
  MoeProblem bad = good;
  bad.ids[7] = 8;
  const TokenCounts counts = conformance::even_split(100, kRanks);
  const std::shared_ptr<Communicator> group = make_group();
  const int rank = group->rank();
  Context context = make_context(good, group, rank);
  DeviceCall call = make_call(bad, counts, rank, rank);
  routed_experts(context, call.input(), call.weights(), call.y.view());
  laws::expect_error(laws::outcome_of([&] { context.check(); }), ErrorCode::kInvalidArgument,
                     {"8"});
  for (const BF16 value : call.y_rows()) EXPECT_TRUE(std::isnan(to_float(value)));
  DeviceCall next = make_call(good, counts, rank, rank);
  routed_experts(context, next.input(), next.weights(), next.y.view());
  EXPECT_NO_THROW(context.check());
  group->barrier(kPatience);
}

// Sums of ranks instead of rows; their bits depend on P.
TEST_F(NcclForward, CombinesPerRankWithinTheToleranceAndAlikeInEveryRun) {
  for (const std::int64_t tokens : {20, 300}) {
    const MoeProblem problem =
        conformance::make_problem({tokens, 256, 72, 9, 4}, RoutePattern::kMixed, 7);
    const TokenCounts counts = conformance::ragged_split(tokens, kRanks, 5);
    const std::shared_ptr<Communicator> group = make_group();
    const int rank = group->rank();
    Context context = make_context(problem, group, rank, kPatience,
                                   [](Config& config) { config.combine = Combine::kPerRank; });
    DeviceCall call = make_call(problem, counts, rank, rank);
    std::vector<BF16> first;
    for (int run = 0; run < 3; ++run) {
      routed_experts(context, call.input(), call.weights(), call.y.view());
      context.check();
      const std::vector<BF16> y = conformance::gather_rows(*group, call.y_rows(), counts, 256);
      if (run == 0) first = y;
      EXPECT_EQ(conformance::first_difference(first, y, 256), "");
    }
    EXPECT_EQ(conformance::first_violation(problem, first), "");
    group->barrier(kPatience);
  }
}

// A rank with a token beside one with many, and one with none: eager, then as graphs in turn.
TEST_F(NcclForward, UnequalCallsAndTheirGraphsGiveTheBitsOfOneRank) {
  constexpr std::int64_t kTokens = 600;
  const MoeProblem problem =
      conformance::make_problem({kTokens, 128, 64, 8, 4}, RoutePattern::kMixed, 9);
  const std::shared_ptr<Communicator> group = make_group();
  const int rank = group->rank();
  const cuda::DeviceScope scope(rank);
  const std::vector<BF16> all = y_of_one_rank(problem, rank);
  Context context = make_context(problem, group, rank);
  for (const TokenCounts& counts :
       {TokenCounts{1, kTokens - 1}, TokenCounts{kTokens, 0}, TokenCounts{3, 2}}) {
    MoeProblem part = problem;
    part.shape.num_tokens = counts[0] + counts[1];
    DeviceCall call = make_call(part, counts, rank, rank);
    const auto begin = all.begin() + (rank == 0 ? 0 : counts[0]) * 128;
    const std::vector<BF16> expected(begin, begin + counts[static_cast<std::size_t>(rank)] * 128);
    routed_experts(context, call.input(), call.weights(), call.y.view());
    context.check();
    EXPECT_EQ(conformance::first_difference(expected, call.y_rows(), 128), "");
    cuda::DeviceGraph graph(rank, [&](void* stream) {
      routed_experts(context, call.input(), call.weights(), call.y.view(), {.stream = stream});
    });
    group->barrier(kPatience);
    for (int replay = 0; replay < 3; ++replay) {
      graph.replay();
      context.check();
      EXPECT_EQ(conformance::first_difference(expected, call.y_rows(), 128), "");
    }
    group->barrier(kPatience);
  }
}

TEST_F(NcclForward, ExceededCapacityIsReportedOnBothRanksAndTheNextCallWorks) {
  const MoeProblem fits =
      conformance::make_problem({64, 128, 64, 8, 1}, RoutePattern::kDistinct, 10);
  MoeProblem overflows = fits;
  std::ranges::fill(overflows.ids, 7);  // all 64 rows to rank 1
  const TokenCounts counts = conformance::even_split(64, kRanks);
  const std::shared_ptr<Communicator> group = make_group();
  const int rank = group->rank();
  Context context = make_context(fits, group, rank, kPatience, [](Config& config) {
    config.max_tokens = 32;
    config.device_scratch_capacity_factor = 1.5;
  });
  for (int round = 0; round < 2; ++round) {
    DeviceCall wrong = make_call(overflows, counts, rank, rank);
    routed_experts(context, wrong.input(), wrong.weights(), wrong.y.view());
    laws::expect_error(laws::outcome_of([&] { context.check(); }), ErrorCode::kCapacityExceeded,
                       {"to rank 1", "64 required", "48 available"});
    for (const BF16 value : wrong.y_rows()) EXPECT_TRUE(std::isnan(to_float(value)));
    DeviceCall right = make_call(fits, counts, rank, rank);
    routed_experts(context, right.input(), right.weights(), right.y.view());
    context.check();
    const std::vector<BF16> y = conformance::gather_rows(*group, right.y_rows(), counts, 128);
    EXPECT_EQ(conformance::first_violation(fits, y), "");
  }
}

TEST_F(NcclForward, ARankThatComesTooLateFailsToo) {
  const MoeProblem problem =
      conformance::make_problem({64, 128, 64, 8, 2}, RoutePattern::kDistinct, 6);
  const std::shared_ptr<Communicator> group = make_group();
  const int rank = group->rank();
  Context context = make_context(problem, group, rank, milliseconds(500));
  DeviceCall call = make_call(problem, conformance::even_split(64, kRanks), rank, rank);
  if (rank == 1) std::this_thread::sleep_for(milliseconds(2000));
  routed_experts(context, call.input(), call.weights(), call.y.view());
  laws::expect_error(laws::outcome_of([&] { context.check(); }), ErrorCode::kPeerLost,
                     {rank == 1 ? "gave the call up" : "rank 1 did not arrive", "call 1"});
  for (const BF16 value : call.y_rows()) EXPECT_TRUE(std::isnan(to_float(value)));
  group->barrier(kPatience);
}

std::size_t free_bytes() {
  std::size_t free = 0;
  std::size_t total = 0;
  DISTMOE_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return free;
}

TEST_F(NcclForward, ContextsComeAndGoAndLeaveNoMemoryBehind) {
  const MoeProblem problem =
      conformance::make_problem({500, 1024, 256, 8, 4}, RoutePattern::kMixed, 2);
  const TokenCounts counts = conformance::even_split(500, kRanks);
  const std::shared_ptr<Communicator> group = make_group();
  const int rank = group->rank();
  const cuda::DeviceScope scope(rank);
  DeviceCall call = make_call(problem, counts, rank, rank);
  std::size_t free_at_first = 0;
  for (int cycle = 0; cycle < 12; ++cycle) {
    Context first = make_context(problem, group, rank);
    Context second = make_context(problem, group, rank);
    for (Context* context : {&first, &second, &first}) {
      routed_experts(*context, call.input(), call.weights(), call.y.view());
      context->check();
    }
    // One rank closes in another order than the other, and neither waits.
    (rank == 0 ? first : second).close();
    (rank == 0 ? second : first).close();
    group->barrier(kPatience);
    if (cycle == 1) free_at_first = free_bytes();
  }
  EXPECT_GE(free_bytes() + (2U << 20), free_at_first);
}

TEST_F(NcclForward, AnotherDeviceThanTheCommunicatorsIsRefusedOnEveryRank) {
  const MoeProblem problem =
      conformance::make_problem({8, 64, 32, 4, 2}, RoutePattern::kDistinct, 1);
  const std::shared_ptr<Communicator> group = make_group();
  const auto outcome = laws::outcome_of([&] { make_context(problem, group, 1 - group->rank()); });
  laws::expect_error(outcome, ErrorCode::kInvalidArgument, {"made its communicator for CUDA"});
}

// A rank that is there but does not make the call: nothing but the device can notice.
// Rank 1 calls nothing, and closes its context after rank 0's call has failed or at once.
class NcclAbsentRank : public NcclForward, public testing::WithParamInterface<bool> {};

TEST_P(NcclAbsentRank, IsNamedAndClosingWaitsForNobody) {
  const bool closes_at_once = GetParam();
  const milliseconds timeout = closes_at_once ? milliseconds(kPatience) : milliseconds(1000);
  const MoeProblem problem =
      conformance::make_problem({64, 128, 64, 8, 2}, RoutePattern::kDistinct, 6);
  const TokenCounts counts = conformance::even_split(64, kRanks);
  const std::shared_ptr<Communicator> group = make_group();
  const int rank = group->rank();
  Context context = make_context(problem, group, rank, timeout);
  if (rank == 0) {
    DeviceCall call = make_call(problem, counts, rank, rank);
    const auto outcome = laws::outcome_of([&] {
      routed_experts(context, call.input(), call.weights(), call.y.view());
      context.check();
    });
    laws::expect_error(outcome, ErrorCode::kPeerLost, {"rank 1"});
    if (!closes_at_once) {
      EXPECT_GE(outcome.seconds, 0.9);
    }
    EXPECT_LT(outcome.seconds, 3.0);
  }
  if (!closes_at_once) group->barrier(kPatience);
  const auto closing = laws::outcome_of([&] { context.close(); });
  EXPECT_LT(closing.seconds, 2.0);
  group->barrier(kPatience);
}

INSTANTIATE_TEST_SUITE_P(ClosesAtOnce, NcclAbsentRank, testing::Bool(),
                         testing::PrintToStringParamName());

// Rank 1 stops or dies between two calls; what it leaves open ends with the process.
class NcclLostRank : public NcclForward {
 protected:
  static void lose(int signal) {
    const MoeProblem problem =
        conformance::make_problem({64, 128, 64, 8, 2}, RoutePattern::kDistinct, 6);
    const std::shared_ptr<Communicator> group = make_group();
    const int rank = group->rank();
    const auto pids = laws::all_gather(*group, static_cast<std::uint64_t>(getpid()));
    Context context = make_context(problem, group, rank, milliseconds(1000));
    DeviceCall call = make_call(problem, conformance::even_split(64, kRanks), rank, rank);
    const auto one_call = [&] {
      routed_experts(context, call.input(), call.weights(), call.y.view());
      context.check();
    };
    one_call();
    if (rank == 1) kill(getpid(), signal);
    laws::expect_error(laws::outcome_of(one_call), ErrorCode::kPeerLost, {"rank 1"});
    const auto closing = laws::outcome_of([&] { context.close(); });
    EXPECT_LT(closing.seconds, 2.0);
    laws::expect_error(laws::outcome_of([&] { group->barrier(milliseconds(1000)); }),
                       ErrorCode::kPeerLost, {"rank 1"});
    kill(static_cast<pid_t>(pids[1]), SIGKILL);
  }
};

TEST_F(NcclLostRank, ThatDiesIsNamed) { lose(SIGKILL); }
TEST_F(NcclLostRank, ThatStopsIsNamed) { lose(SIGSTOP); }

TEST(NcclEngine, TwoRanksOfOneGpuAreRefused) {
  if (const std::string reason = why_not(1); !reason.empty()) GTEST_SKIP() << reason;
  const auto host = make_tcp_communicator(torchrun_group(), kPatience);
  const auto outcome = laws::outcome_of([&] { make_nccl_communicator(host, 0, kPatience); });
  laws::expect_error(outcome, ErrorCode::kUnsupported, {"ranks 0 and 1 use the same GPU"});
}

TEST(NcclEngine, OneRankNeedsNoPeers) {
  if (const std::string reason = why_not(1); !reason.empty()) GTEST_SKIP() << reason;
  const auto group = make_nccl_communicator(make_thread_group(1)[0], 0, kPatience);
  EXPECT_EQ(group->symmetric_memory(), nullptr);
  EXPECT_EQ(group->name(), "nccl");
  const MoeProblem problem =
      conformance::make_problem({64, 128, 64, 8, 2}, RoutePattern::kDistinct, 6);
  Context context = make_context(problem, group, 0);
  DeviceCall call = make_call(problem, {64}, 0, 0);
  routed_experts(context, call.input(), call.weights(), call.y.view());
  context.check();
  EXPECT_EQ(conformance::first_violation(problem, call.y_rows()), "");
}

TEST(NcclEngine, SaysWhyItCannotBeUsed) {
  if (why_not(1).empty()) GTEST_SKIP() << "it can";
  laws::expect_error(
      laws::outcome_of([] { make_nccl_communicator(make_thread_group(1)[0], 0, kPatience); }),
      ErrorCode::kUnsupported, {"the NCCL engine"});
  laws::expect_error(laws::outcome_of([] { make_nccl_communicator(nullptr, 0, kPatience); }),
                     ErrorCode::kInvalidArgument, {"communicator of the host"});
}

}  // namespace
}  // namespace distmoe
