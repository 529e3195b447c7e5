// SPDX-License-Identifier: Apache-2.0
//
// Invariant: no step of a call writes outside the section of the plan that is its own: with a
// canary in front of and behind every buffer, all of them live through the largest load that the
// plan takes. reports: A102
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "backend/backend.hpp"
#include "conformance/moe_gradients.hpp"
#include "conformance/moe_oracle.hpp"
#include "layout/context_buffers.hpp"
#include "runtime/backward.hpp"
#include "runtime/forward.hpp"
#include "runtime/saved_forward_impl.hpp"

namespace distmoe {
namespace {

using conformance::BackwardForm;
using conformance::MoeCase;
using conformance::MoeProblem;
using conformance::RankCall;
using conformance::RankGradients;
using conformance::RoutePattern;
using conformance::TokenCounts;

constexpr std::int64_t kCanaryBytes = 256;
constexpr std::byte kCanary{0xC5};

/// A plan with canaries, and where they and the call headers are from its base.
struct GuardedPlan {
  MemoryPlan plan;
  std::vector<std::int64_t> canaries;
  std::int64_t headers = 0;

  explicit GuardedPlan(MemoryPlan original) : plan(std::move(original)) {
    std::int64_t offset =
        plan.total_activation_bytes + plan.device_scratch_bytes + plan.host_scratch_bytes;
    for (auto* list : {&plan.communication_buffers, &plan.metadata_buffers, &plan.control_buffers,
                       &plan.workspace_buffers}) {
      std::vector<PlanBuffer> guarded;
      const auto append = [&](const PlanBuffer& buffer) {
        guarded.push_back(buffer);
        offset += buffer.bytes;
      };
      const auto append_canary = [&] {
        canaries.push_back(offset);
        append({"canary", kCanaryBytes});
      };
      append_canary();
      for (const PlanBuffer& buffer : *list) {
        if (buffer.name == buffer_name::kCallHeaders) headers = offset;
        append(buffer);
        append_canary();
      }
      *list = std::move(guarded);
    }
    plan.allocated_bytes = offset;
  }
};

/// Remembers where the first exchange of a call, that of the headers, puts what it receives.
class WatchingCommunicator final : public Communicator {
 public:
  explicit WatchingCommunicator(std::shared_ptr<Communicator> inner) : inner_(std::move(inner)) {}
  int rank() const noexcept override { return inner_->rank(); }
  int size() const noexcept override { return inner_->size(); }
  std::string_view name() const noexcept override { return "watching"; }
  void alltoallv(std::span<const std::span<const std::byte>> send,
                 std::span<const std::span<std::byte>> recv, Timeout timeout) override {
    const std::size_t peer = rank() == 0 ? 1 : 0;
    if (headers == nullptr) {
      headers = recv[peer].data() - static_cast<std::int64_t>(peer) * kCallHeaderBytes;
    }
    inner_->alltoallv(send, recv, timeout);
  }
  void barrier(Timeout timeout) override { inner_->barrier(timeout); }
  void abort(std::string_view reason) noexcept override { inner_->abort(reason); }

  std::byte* headers = nullptr;

 private:
  std::shared_ptr<Communicator> inner_;
};

/// A call on a context that no public one can make; in training it saves and has its backward.
void run_call(ContextImpl& impl, const RankCall& call, const RankGradients& gradients) {
  std::unique_ptr<SavedForwardImpl> saved;
  run_forward(
      impl,
      {call.input, call.weights, call.y_view(), {}, impl.config().inference ? nullptr : &saved});
  if (saved == nullptr) return;
  const SavedForward forward(std::move(saved));
  run_backward(impl, {forward, gradients.dy(), call.weights, gradients.destinations(), {}});
}

void expect_canaries_live(const MoeProblem& problem, const MoeCase& moe_case,
                          const std::optional<BackwardForm>& training = std::nullopt) {
  const TokenCounts counts = conformance::even_split(problem.shape.num_tokens, moe_case.ranks);
  const Config config =
      training ? conformance::training_config(problem, moe_case, *training, counts.back())
               : conformance::config_of(problem, moe_case, {}, counts.back());
  const std::vector<BF16> dy = conformance::make_dy(problem, 162);
  const std::vector<BF16> expected = conformance::run(problem, moe_case);
  const GuardedPlan guarded(
      plan_memory(config, moe_case.ranks, {.num_threads = moe_case.num_threads}));
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    const int rank = communicator->rank();
    const auto watching = std::make_shared<WatchingCommunicator>(communicator);
    ContextImpl impl(config, guarded.plan,
                     cpu::make_backend({.config = config,
                                        .plan = guarded.plan,
                                        .communicator = watching,
                                        .timeout = std::chrono::seconds(60),
                                        .num_threads = moe_case.num_threads,
                                        .rank = rank,
                                        .size = moe_case.ranks}),
                     std::make_shared<SlotLedger>(guarded.plan.num_slots, 1), communicator,
                     std::chrono::seconds(60), rank, moe_case.ranks, Device{});
    const RankCall call = conformance::pack_rank(problem, {}, counts, rank);
    const RankGradients gradients(problem, dy, {}, counts, rank);
    run_call(impl, call, gradients);
    ASSERT_NE(watching->headers, nullptr);
    std::byte* base = watching->headers - guarded.headers;
    for (const std::int64_t canary : guarded.canaries) {
      std::fill_n(base + canary, kCanaryBytes, kCanary);
    }
    run_call(impl, call, gradients);
    for (const std::int64_t canary : guarded.canaries) {
      EXPECT_TRUE(std::all_of(base + canary, base + canary + kCanaryBytes,
                              [](std::byte b) { return b == kCanary; }))
          << "rank " << rank << " wrote at byte " << canary << " of its context";
    }
    const std::int64_t width = problem.shape.hidden_dim;
    const auto y = conformance::gather_rows(*communicator, call.y_rows(), counts, width);
    EXPECT_EQ(conformance::first_difference(expected, y, width), "");
  });
}

TEST(MemorySections, CanariesLiveThroughTheLargestLoad) {
  for (const Combine combine : {Combine::kPerRoute, Combine::kPerRank}) {
    for (const int ranks : {2, 3, 5}) {
      const MoeCase moe_case{.ranks = ranks, .num_threads = 2, .combine = combine};
      for (const std::int64_t width : {1, 32, 67}) {
        SCOPED_TRACE(testing::Message() << ranks << " ranks, width " << width);
        // One expert takes every route of the group: all rows that the plan has.
        expect_canaries_live(conformance::make_problem({.num_tokens = 64 * ranks,
                                                        .hidden_dim = width,
                                                        .intermediate_dim = width,
                                                        .num_experts = 5,
                                                        .top_k = 4},
                                                       RoutePattern::kOneExpert, 160),
                             moe_case);
        expect_canaries_live(conformance::make_problem({.num_tokens = 64 * ranks,
                                                        .hidden_dim = width,
                                                        .intermediate_dim = width,
                                                        .num_experts = 5,
                                                        .top_k = 4},
                                                       RoutePattern::kDistinct, 161),
                             moe_case);
      }
    }
  }
}

TEST(MemorySections, CanariesLiveThroughTheLargestBackward) {
  for (const ActivationPolicy policy : {ActivationPolicy::kFull, ActivationPolicy::kLean}) {
    for (const Combine combine : {Combine::kPerRoute, Combine::kPerRank}) {
      if (policy == ActivationPolicy::kFull && combine == Combine::kPerRank) continue;
      for (const int ranks : {2, 3, 5}) {
        const MoeCase moe_case{.ranks = ranks, .num_threads = 2, .combine = combine};
        for (const std::int64_t width : {1, 32, 67}) {
          for (const RoutePattern pattern : {RoutePattern::kOneExpert, RoutePattern::kDistinct}) {
            SCOPED_TRACE(testing::Message() << ranks << " ranks, width " << width);
            const MoeProblem problem = conformance::make_problem({.num_tokens = 64 * ranks,
                                                                  .hidden_dim = width,
                                                                  .intermediate_dim = width,
                                                                  .num_experts = 5,
                                                                  .top_k = 4},
                                                                 pattern, 163);
            expect_canaries_live(problem, moe_case, BackwardForm{.policy = policy});
            expect_canaries_live(problem, moe_case,
                                 BackwardForm{.policy = policy, .slot_factor = 1.0 * ranks});
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace distmoe
