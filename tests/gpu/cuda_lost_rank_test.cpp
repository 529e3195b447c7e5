// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a rank that lost a peer, or left, never changes what a peer may still read or write:
// its later calls fail without touching anything of theirs, its windows outlive it, and who waits
// for it learns at once that it is gone.
#include <atomic>
#include <thread>

#include "backend/cuda/cuda_backend.hpp"
#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/device.hpp"
#include "backend/cuda/published.hpp"
#include "conformance/moe_gradients.hpp"
#include "conformance/moe_oracle.hpp"
#include "conformance/moe_refusal.hpp"
#include "distmoe/routed_experts_backward.hpp"
#include "gpu/gpu_ranks.hpp"
#include "layout/context_buffers.hpp"
#include "runtime/context_impl.hpp"

namespace distmoe::gpu {
namespace {

using conformance::BackwardForm;
using conformance::DeviceCall;
using conformance::DeviceGradients;
using conformance::expect_error;
using conformance::MoeProblem;
using conformance::Outcome;
using conformance::outcome_of;
using conformance::RankCall;
using conformance::RankGradients;
using conformance::RoutePattern;
using std::chrono::milliseconds;

class CudaLostRank : public GpuTest {};

constexpr milliseconds kTimeout{400};

MoeProblem problem_of(std::uint64_t seed) {
  return conformance::make_problem({60, 128, 64, 9, 3}, RoutePattern::kDistinct, seed);
}

/// Two and three ranks on one device, and ranks of two.
void for_each_group(const std::function<void(const GpuRun& run)>& body) {
  std::vector<Devices> placements = {{0, 0}, {0, 0, 0}};
  if (cuda::device_count() > 1) placements.push_back({0, 1});
  for (const Devices& devices : placements) {
    SCOPED_TRACE(name_of(devices));
    body({.devices = devices,
          .counts = conformance::even_split(60, static_cast<int>(devices.size()))});
  }
}

/// The header and the ids that this rank last showed its peers.
std::vector<std::int32_t> published_words(Context& context, std::size_t num_ids) {
  const auto& backend = dynamic_cast<cuda::CudaBackend&>(*context.impl().backend());
  std::vector<std::int32_t> words(sizeof(cuda::PublishedHeader) / sizeof(std::int32_t) + num_ids);
  DISTMOE_CUDA_CHECK(cudaMemcpy(words.data(), backend.memory().buffer(buffer_name::kIdWindow),
                                words.size() * sizeof(std::int32_t), cudaMemcpyDeviceToHost));
  return words;
}

/// Whether what this rank shows its peers is `call`'s ids.
bool still_shows_ids(Context& context, const DeviceCall& call, const GpuRun& run) {
  const std::int64_t num_tokens = run.counts[static_cast<std::size_t>(context.rank())];
  std::vector<std::int32_t> ids(static_cast<std::size_t>(num_tokens * 3));
  call.ids.buffer().download(ids.data(), ids.size() * sizeof(std::int32_t));
  const std::vector<std::int32_t> words = published_words(context, ids.size());
  return std::equal(ids.begin(), ids.end(), words.end() - std::ssize(ids));
}

/// Calls that were enqueued before the host knew.
TEST_F(CudaLostRank, LaterCallsFailAtOnceAndLeaveTheWindowsAlone) {
  const MoeProblem problem = problem_of(20);
  const MoeProblem other = problem_of(21);
  for_each_group([&](GpuRun run) {
    const auto ranks = static_cast<int>(run.devices.size());
    run.adjust = [](Config& config) { config.timeout = kTimeout; };
    std::atomic<int> num_reported{0};
    on_every_rank(problem, run, [&](Context& context, DeviceCall& call, Communicator&) {
      const int late = ranks - 1;
      const int device = run.devices[static_cast<std::size_t>(context.rank())];
      const RankCall host = conformance::pack_rank(other, run.form, run.counts, context.rank());
      const DeviceCall second(host, device);
      if (context.rank() == late) {
        while (num_reported < late) std::this_thread::sleep_for(milliseconds(10));
        routed_experts(context, call.input(), call.weights(), call.y.view());
        expect_error(outcome_of([&] { context.check(); }), ErrorCode::kPeerLost,
                     {"gave the call up", "call 1"});
        EXPECT_TRUE(all_nan(call.y_rows()));
        return;
      }
      routed_experts(context, call.input(), call.weights(), call.y.view());
      for (int i = 0; i < 8; ++i) {
        routed_experts(context, second.input(), second.weights(), second.y.view());
      }
      const Outcome outcome = outcome_of([&] { context.check(); });
      expect_error(outcome, ErrorCode::kPeerLost,
                   {"rank " + std::to_string(late), "400 ms", "call 1"});
      EXPECT_LT(outcome.seconds, 3.0) << "nine calls, of which one may wait";
      EXPECT_TRUE(all_nan(call.y_rows()));
      EXPECT_TRUE(all_nan(second.y_rows()));

      EXPECT_TRUE(still_shows_ids(context, call, run))
          << "the ids of the first call are gone, while a late peer may route with them";
      ++num_reported;
    });
  });
}

std::vector<BF16> rows_of(const TensorView& view) {
  std::vector<BF16> rows;
  for (std::int64_t row = 0; row < view.shape[0]; ++row) {
    const BF16* data = static_cast<const BF16*>(view.data) + row * view.strides[0];
    rows.insert(rows.end(), data, data + view.shape[1]);
  }
  return rows;
}

void train(Context& context, const DeviceCall& call, const DeviceGradients& gradients) {
  SavedForward saved = saving_routed_experts(context, call.input(), call.weights(), call.y.view());
  routed_experts_backward(context, std::move(saved), gradients.dy(), call.weights(),
                          gradients.destinations());
}

/// A peer comes to the forward and, late, to its backward.
TEST_F(CudaLostRank, LaterBackwardsFailAtOnceAndLeaveTheWindowsAlone) {
  const MoeProblem problem = problem_of(25);
  const MoeProblem other = problem_of(26);
  const std::vector<BF16> dy = conformance::make_dy(problem, 27);
  const BackwardForm form;
  for_each_group([&](GpuRun run) {
    const auto ranks = static_cast<int>(run.devices.size());
    run.adjust = [](Config& config) {
      config.timeout = kTimeout;
      config.inference = false;
    };
    std::atomic<int> num_reported{0};
    on_every_rank(problem, run, [&](Context& context, DeviceCall& call, Communicator& group) {
      const int late = ranks - 1;
      const int device = run.devices[static_cast<std::size_t>(context.rank())];
      const RankCall host = conformance::pack_rank(other, run.form, run.counts, context.rank());
      const DeviceCall second(host, device);
      const RankGradients first_host(problem, dy, form, run.counts, context.rank());
      const DeviceGradients first_gradients(first_host, device);
      const RankGradients second_host(problem, dy, form, run.counts, context.rank());
      const DeviceGradients second_gradients(second_host, device);
      group.barrier(std::chrono::seconds(60));  // allocations may wait for the device
      if (context.rank() == late) {
        SavedForward saved =
            saving_routed_experts(context, call.input(), call.weights(), call.y.view());
        while (num_reported < late) std::this_thread::sleep_for(milliseconds(10));
        routed_experts_backward(context, std::move(saved), first_gradients.dy(), call.weights(),
                                first_gradients.destinations());
        expect_error(outcome_of([&] { context.check(); }), ErrorCode::kPeerLost,
                     {"gave the call up", "call 2"});
        // It found its peers' dy and lost them later: the weights' gradients may be complete by
        // then.
        first_gradients.fetch();
        EXPECT_TRUE(all_nan(rows_of(first_host.destinations().grad_x_TD)));
        EXPECT_FALSE(all_nan(call.y_rows()));
        return;
      }
      train(context, call, first_gradients);
      for (int i = 0; i < 4; ++i) train(context, second, second_gradients);
      const Outcome outcome = outcome_of([&] { context.check(); });
      expect_error(outcome, ErrorCode::kPeerLost,
                   {"rank " + std::to_string(late), "400 ms", "call 2"});
      EXPECT_LT(outcome.seconds, 3.0) << "ten calls, of which one may wait";
      for (const auto* gradients : {&first_gradients, &second_gradients}) gradients->fetch();
      EXPECT_TRUE(first_host.is_of_a_failed_call(BackendKind::kCuda));
      EXPECT_TRUE(second_host.is_of_a_failed_call(BackendKind::kCuda));
      EXPECT_FALSE(all_nan(call.y_rows()));
      EXPECT_TRUE(all_nan(second.y_rows()));

      EXPECT_TRUE(still_shows_ids(context, call, run));
      ++num_reported;
    });
  });
}

/// The late rank signals to, and reads from, ranks whose contexts were closed.
TEST_F(CudaLostRank, WindowsOutliveTheContextOfARankThatGaveUp) {
  const MoeProblem problem = problem_of(22);
  for_each_group([&](GpuRun run) {
    const auto ranks = static_cast<int>(run.devices.size());
    // Windows of 100 MiB, which leave the address space when they are freed.
    run.adjust = [](Config& config) {
      config.timeout = kTimeout;
      config.max_tokens = 1 << 17;
    };
    std::atomic<int> num_closed{0};
    on_every_rank(problem, run, [&](Context& context, DeviceCall& call, Communicator&) {
      const int late = ranks - 1;
      if (context.rank() == late) {
        while (num_closed < late) std::this_thread::sleep_for(milliseconds(10));
      }
      routed_experts(context, call.input(), call.weights(), call.y.view());
      expect_error(outcome_of([&] { context.check(); }), ErrorCode::kPeerLost, {"call 1"});
      context.close();
      EXPECT_EQ(context.allocated_bytes(), 0);
      ++num_closed;
    });
    // The devices are well.
    EXPECT_EQ(conformance::first_violation(
                  problem, run_cuda(problem, {.devices = run.devices, .counts = run.counts})),
              "");
  });
}

TEST_F(CudaLostRank, AContextThatClosesIsNoticedAtOnce) {
  const MoeProblem problem = problem_of(23);
  for_each_group([&](const GpuRun& run) {  // with the timeout of 20 s
    on_every_rank(problem, run, [&](Context& context, DeviceCall& call, Communicator&) {
      if (context.rank() == 0) return context.close();
      routed_experts(context, call.input(), call.weights(), call.y.view());
      const Outcome outcome = outcome_of([&] { context.check(); });
      expect_error(outcome, ErrorCode::kPeerLost, {"rank 0 left the group"});
      EXPECT_LT(outcome.seconds, 10.0);
      EXPECT_TRUE(all_nan(call.y_rows()));
    });
  });
}

/// Leaving is a fault only where a peer needs the rank that left.
TEST_F(CudaLostRank, ClosingAfterTheLastCallHarmsNoPeer) {
  const MoeProblem problem = problem_of(24);
  for_each_group([&](const GpuRun& run) {
    for (int round = 0; round < 20; ++round) {
      RowsOfRanks rows(run.devices.size());
      on_every_rank(problem, run, [&](Context& context, DeviceCall& call, Communicator&) {
        routed_experts(context, call.input(), call.weights(), call.y.view());
        if (context.rank() != round % std::ssize(run.devices)) context.check();
        context.close();
        rows.put(context.rank(), call.y_rows());
      });
      ASSERT_EQ(conformance::first_violation(problem, rows.all()), "") << round;
    }
  });
}

}  // namespace
}  // namespace distmoe::gpu
