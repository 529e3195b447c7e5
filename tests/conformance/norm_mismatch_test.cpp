// SPDX-License-Identifier: Apache-2.0
//
// Invariant: ranks that ask for different norms in one call are told so, all of them, and nothing
// is written.
#include <gtest/gtest.h>

#include "conformance/moe_refusal.hpp"
#include "conformance/moe_runner.hpp"
#include "distmoe/routed_experts_backward.hpp"

namespace distmoe::conformance {
namespace {

class NormMismatch : public testing::TestWithParam<MoeCase> {};
INSTANTIATE_TEST_SUITE_P(Laws, NormMismatch, testing::ValuesIn(group_cases()), case_name);

TEST_P(NormMismatch, IsToldToEveryRank) {
  const MoeProblem problem = make_problem({.num_tokens = 3L * GetParam().ranks,
                                           .hidden_dim = 10,
                                           .intermediate_dim = 6,
                                           .num_experts = 5,
                                           .top_k = 2},
                                          RoutePattern::kMixed, 790);
  const TokenCounts counts = even_split(problem.shape.num_tokens, GetParam().ranks);
  const std::optional<PostExpertNorm> others[] = {std::nullopt, PostExpertNorm{.eps = 2e-5},
                                                  PostExpertNorm{.eps = 1e-5, .uses_kahan = true}};
  for (const std::optional<PostExpertNorm>& other : others) {
    for (const bool saves : {false, true}) {
      run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
        Config config = config_of(problem, GetParam(), {}, counts.back());
        config.inference = !saves;
        Context context = make_context(config, GetParam(), communicator);
        const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
        CallOptions options;
        options.norm = PostExpertNorm{.eps = 1e-5};
        if (communicator->rank() == 1) options.norm = other;
        const Outcome outcome = outcome_of([&] {
          if (saves) {
            const SavedForward unused =
                saving_routed_experts(context, call.input, call.weights, call.y_view(), options);
          } else {
            routed_experts(context, call.input, call.weights, call.y_view(), options);
          }
        });
        expect_error(outcome, ErrorCode::kPeerMismatch, {"RMSNorm", "rank 1 takes"});
        EXPECT_TRUE(call.is_y_untouched());
      });
    }
  }
}

}  // namespace
}  // namespace distmoe::conformance
