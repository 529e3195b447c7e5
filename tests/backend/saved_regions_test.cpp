// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a saving call and its backward write the slot's bytes of the call and their own
// scratch, and no other byte of the activation buffer; what it keeps is what the memory plan says:
// x gathered in the order of rows, h1 behind it and h3 by token and k, or this rank's own x.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "backend/cpu/cpu_backend.hpp"
#include "conformance/moe_gradients.hpp"
#include "conformance/moe_oracle.hpp"
#include "plan/layer_bytes.hpp"
#include "runtime/context_impl.hpp"

namespace distmoe {
namespace {

using conformance::MoeCase;
using conformance::MoeProblem;
using conformance::RankCall;
using conformance::RoutePattern;
using conformance::TokenCounts;

constexpr std::byte kCanary{0xC5};
constexpr std::int64_t kTokens = 24;  // a rank
constexpr std::int64_t kHidden = 33;
constexpr std::int64_t kIntermediate = 19;
constexpr std::int64_t kTopK = 3;
constexpr std::int64_t kExperts = 7;

struct Policy {
  ActivationPolicy policy;
  std::optional<double> slot_factor;
};

/// The rows of x that `rank` receives, by local expert, source rank, token and k.
std::vector<BF16> gathered_rows(const MoeProblem& problem, const Context& context) {
  std::vector<BF16> rows;
  const std::int64_t end = context.first_expert() + context.num_local_experts();
  for (std::int64_t expert = context.first_expert(); expert < end; ++expert) {
    for (std::int64_t route = 0; route < problem.num_routes(); ++route) {
      if (problem.ids[static_cast<std::size_t>(route)] != expert) continue;
      const BF16* row = problem.x.data() + route / kTopK * kHidden;
      rows.insert(rows.end(), row, row + kHidden);
    }
  }
  return rows;
}

/// y as the kept results of the routes give it.
std::vector<BF16> y_of(const BF16* h3, const MoeProblem& problem, std::int64_t first_token) {
  std::vector<BF16> y;
  for (std::int64_t token = 0; token < kTokens; ++token) {
    for (std::int64_t d = 0; d < kHidden; ++d) {
      float sum = 0.0F;
      for (std::int64_t k = 0; k < kTopK; ++k) {
        const auto route = static_cast<std::size_t>((first_token + token) * kTopK + k);
        if (problem.ids[route] < 0) continue;
        const float product =
            to_float(h3[(token * kTopK + k) * kHidden + d]) * problem.scores[route];
        sum += product;
      }
      y.push_back(to_bf16(sum));
    }
  }
  return y;
}

template <typename Rows>
bool starts_with(const std::byte* bytes, const Rows& rows) {
  // A rank may have none: memcmp takes no null pointer.
  return rows.empty() || std::memcmp(bytes, rows.data(), rows.size() * sizeof(rows[0])) == 0;
}

/// The activation buffer of a context, all canaries.
class Activations {
 public:
  explicit Activations(Context& context)
      : plan_(context.memory_plan()),
        bytes_(dynamic_cast<cpu::CpuBackend&>(*context.impl().backend()).memory().activations()) {
    std::ranges::fill(bytes_, kCanary);
  }
  /// Expects that nothing outside [begin, end) of the slots and the last `scratch_bytes` changed.
  void expect_untouched_outside(std::int64_t begin, std::int64_t end, std::int64_t scratch_bytes) {
    for (std::int64_t i = 0; i < plan_.total_virtual_bytes - scratch_bytes; ++i) {
      if (i >= begin && i < end) continue;
      ASSERT_EQ(bytes_[static_cast<std::size_t>(i)], kCanary) << "byte " << i;
    }
  }
  const std::byte* at(std::int64_t offset) const { return bytes_.data() + offset; }

 private:
  const MemoryPlan& plan_;
  std::span<std::byte> bytes_;
};

class SavedRegions : public testing::TestWithParam<Policy> {
 protected:
  void check_rank(const MoeProblem& problem, const MoeCase& moe_case,
                  const std::shared_ptr<Communicator>& communicator);
};

void SavedRegions::check_rank(const MoeProblem& problem, const MoeCase& moe_case,
                              const std::shared_ptr<Communicator>& communicator) {
  const int rank = communicator->rank();
  const TokenCounts counts = conformance::even_split(problem.shape.num_tokens, moe_case.ranks);
  Config config = conformance::config_of(problem, moe_case, {}, kTokens);
  config.inference = false;
  config.num_activation_slots = 3;
  config.max_moe_layers_per_activation_slot = 2;
  config.activation_policy = GetParam().policy;
  config.activation_slot_capacity_factor = GetParam().slot_factor;
  Context context = conformance::make_context(config, moe_case, communicator);
  const MemoryPlan& plan = context.memory_plan();
  const LayerBytes<> layer{layer_dims(config)};
  const RankCall call = conformance::pack_rank(problem, {}, counts, rank);
  Activations activations(context);
  context.select_activation_slot(1, 2);

  std::vector<SavedForward> saved;
  std::int64_t used = 0;
  for (int i = 0; i < 2; ++i) {
    saved.push_back(saving_routed_experts(context, call.input, call.weights, call.y_view()));
    const CallStatistics facts = context.last_call();
    const std::int64_t rows = facts.rows_per_rank[static_cast<std::size_t>(rank)];
    EXPECT_EQ(facts.is_recomputed, !GetParam().slot_factor);
    EXPECT_EQ(facts.device_scratch_bytes, context.region_peaks().device_scratch_bytes);
    EXPECT_EQ(facts.host_scratch_bytes, 0);
    const std::int64_t begin = plan.slot_bytes + used;
    used += facts.is_recomputed ? layer.input(kTokens) : layer.saved(kTokens, rows);
    EXPECT_EQ(context.region_peaks().slot_bytes, (std::vector<std::int64_t>{0, used, 0}));
    EXPECT_LE(context.region_peaks().device_scratch_bytes, layer.scratch(rows));
    activations.expect_untouched_outside(plan.slot_bytes, plan.slot_bytes + used,
                                         context.region_peaks().device_scratch_bytes);
    if (facts.is_recomputed || GetParam().policy == ActivationPolicy::kLean) {
      const BF16* own = problem.x.data() + rank * kTokens * kHidden;
      EXPECT_TRUE(starts_with(activations.at(begin), std::span(own, kTokens * kHidden)));
      continue;
    }
    EXPECT_TRUE(starts_with(activations.at(begin), gathered_rows(problem, context)));
    const std::int64_t h3 =
        begin + LayerBytes<>::dense(rows, kHidden) + LayerBytes<>::dense(rows, 2 * kIntermediate);
    const auto expected = y_of(reinterpret_cast<const BF16*>(activations.at(h3)), problem,
                               std::int64_t{rank} * kTokens);
    EXPECT_EQ(conformance::first_difference(expected, call.y_rows(), kHidden), "");
  }
  // Their backwards, which may use every region of scratch.
  const std::vector<BF16> dy = conformance::make_dy(problem, 321);
  const conformance::RankGradients gradients(problem, dy, {}, counts, rank);
  for (; !saved.empty(); saved.pop_back()) {
    routed_experts_backward(context, std::move(saved.back()), gradients.dy(), call.weights,
                            gradients.destinations());
  }
  const std::int64_t rows = context.last_call().rows_per_rank[static_cast<std::size_t>(rank)];
  EXPECT_LE(context.region_peaks().device_scratch_bytes, layer.scratch(rows));
  EXPECT_EQ(context.region_peaks().slot_bytes, (std::vector<std::int64_t>{0, used, 0}));
  activations.expect_untouched_outside(plan.slot_bytes, plan.slot_bytes + used,
                                       context.region_peaks().device_scratch_bytes);
}

TEST_P(SavedRegions, HoldWhatThePlanSaysAndNothingElseIsWritten) {
  for (const int ranks : {1, 3}) {
    for (const RoutePattern pattern : {RoutePattern::kMixed, RoutePattern::kOneExpert}) {
      const MoeCase moe_case{.ranks = ranks, .num_threads = 2};
      // A slot for the fullest rank takes a factor of P.
      const MoeProblem problem = conformance::make_problem({.num_tokens = kTokens * ranks,
                                                            .hidden_dim = kHidden,
                                                            .intermediate_dim = kIntermediate,
                                                            .num_experts = kExperts,
                                                            .top_k = kTopK},
                                                           pattern, 320);
      conformance::run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
        check_rank(problem, moe_case, communicator);
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, SavedRegions,
                         testing::Values(Policy{ActivationPolicy::kFull, std::nullopt},
                                         Policy{ActivationPolicy::kFull, 3.0},
                                         Policy{ActivationPolicy::kLean, std::nullopt},
                                         Policy{ActivationPolicy::kLean, 3.0}));

}  // namespace
}  // namespace distmoe
