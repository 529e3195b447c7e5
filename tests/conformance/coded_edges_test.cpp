// SPDX-License-Identifier: Apache-2.0
//
// Invariant: in low precision, too, calls without tokens or without routes give zeros and leave
// the calls after them alone, data may lie at any element, and gradients are added to what is
// there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "conformance/moe_gradients.hpp"
#include "conformance/moe_oracle.hpp"
#include "conformance/moe_runner.hpp"

namespace distmoe::conformance {
namespace {

class CodedEdges : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, CodedEdges, testing::ValuesIn(coded_cases()), case_name);

class CodedGradientEdges : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, CodedGradientEdges, testing::ValuesIn(coded_training_cases()),
                         case_name);

MoeProblem problem_of(const MoeCase& moe_case, std::uint64_t seed) {
  MoeProblem problem = make_problem(fit({.num_tokens = 35,
                                         .hidden_dim = 96,
                                         .intermediate_dim = 64,
                                         .num_experts = 5,
                                         .top_k = 3},
                                        moe_case),
                                    RoutePattern::kMixed, seed);
  add_biases(problem, seed + 1);
  return problem;
}

MoeProblem without_tokens(MoeProblem problem) {
  problem.shape.num_tokens = 0;
  problem.x.clear(), problem.ids.clear(), problem.scores.clear();
  return problem;
}

MoeProblem without_routes(MoeProblem problem) {
  std::ranges::fill(problem.ids, -1);
  return problem;
}

// reports: A03, A04, A27
TEST_P(CodedEdges, CallsWithoutTokensOrRoutesLeaveTheNextAlone) {
  const MoeCase& moe_case = GetParam();
  const MoeProblem problem = problem_of(moe_case, 860);
  const MoeProblem no_routes = without_routes(problem);
  const MoeProblem no_tokens = without_tokens(problem);
  const Config config = config_of(problem, moe_case, {}, problem.shape.num_tokens);
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(config, moe_case, communicator);
    const auto y_of = [&](const MoeProblem& some) {
      const RankCall call =
          pack_rank(some, form_of(moe_case), even_split(some.shape.num_tokens, moe_case.ranks),
                    communicator->rank());
      call_experts(context, call);
      return call.y_rows();
    };
    const std::vector<BF16> expected = y_of(problem);
    for (const MoeProblem* empty : {&no_tokens, &no_routes}) {
      const std::vector<BF16> zeros = y_of(*empty);
      EXPECT_TRUE(std::ranges::all_of(zeros, [](BF16 value) { return value.bits == 0; }));
      EXPECT_EQ(first_difference(expected, y_of(problem), problem.shape.hidden_dim), "");
    }
  });
}

// reports: A71, A104: results travel and are summed as in BF16: one of 500 is not cut at 448, the
// most of E4M3, and 256 + 1 + 1 is 258.
TEST_P(CodedEdges, ResultsAreNeverRoundedToTheFormat) {
  const MoeCase& moe_case = GetParam();
  MoeProblem problem = make_problem(
      fit({.num_tokens = 6, .hidden_dim = 32, .intermediate_dim = 32, .num_experts = 6, .top_k = 3},
          moe_case),
      RoutePattern::kDistinct, 865);
  add_biases(problem, 866);
  std::ranges::fill(problem.down, BF16{0});
  const auto y_with = [&](std::vector<float> results, std::vector<float> scores) {
    for (std::size_t route = 0; route < problem.ids.size(); ++route) {
      // Expert e answers results[e % 3].
      problem.ids[route] = static_cast<std::int64_t>(route / 3 % 2 * 3 + route % 3);
      problem.scores[route] = scores[route % 3];
    }
    for (std::size_t i = 0; i < problem.down_bias.size(); ++i) {
      problem.down_bias[i] = results[i / 32 % 3];
    }
    return run(problem, moe_case);
  };
  for (const BF16 y : y_with({500, 0.25F, 0.5F}, {1, 0, 0})) EXPECT_EQ(to_float(y), 500.0F);
  for (const BF16 y : y_with({256, 1, 1}, {1, 1, 1})) EXPECT_EQ(to_float(y), 258.0F);
}

// reports: A38
TEST_P(CodedEdges, DataMayLieAtAnyElement) {
  const MoeCase& moe_case = GetParam();
  const MoeProblem problem = problem_of(moe_case, 870);
  const TokenCounts counts = even_split(problem.shape.num_tokens, moe_case.ranks);
  const Config config = config_of(problem, moe_case, {}, problem.shape.num_tokens);
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(config, moe_case, communicator);
    RankCall call = pack_rank(problem, form_of(moe_case), counts, communicator->rank());
    call_experts(context, call);
    const std::vector<BF16> expected = call.y_rows();
    for (PackedTensor* tensor : {&call.x, &call.w13, &call.w2, &call.y}) tensor->move_by_one();
    call.y.poison();
    call.input.x_TD = call.x.view();
    if (call.weights.w13_L2FD.is_given()) {
      call.weights.w13_L2FD = call.w13.view();
      call.weights.w2_LDF = call.w2.view();
    }
    // Of prepared weights: codes and scales of single bytes, wherever they lie.
    std::vector<std::vector<std::byte>> memory;
    for (PreparedWeightView* weight : {&call.weights.prepared_w13, &call.weights.prepared_w2}) {
      if (!weight->is_given()) continue;
      for (TensorView* array : {&weight->codes, &weight->scales}) {
        const std::size_t size = array->num_bytes();
        std::vector<std::byte>& bytes = memory.emplace_back(size + 1);
        if (size > 0) std::memcpy(bytes.data() + 1, array->data, size);
        array->data = bytes.data() + 1;
      }
    }
    call_experts(context, call);
    EXPECT_EQ(first_difference(expected, call.y_rows(), problem.shape.hidden_dim), "");
  });
}

// reports: A07, A27
TEST_P(CodedGradientEdges, WithoutRoutesAreZeros) {
  const MoeProblem problem = without_routes(problem_of(GetParam(), 880));
  const MoeProblem no_tokens = without_tokens(problem);
  const std::vector<BF16> dy = make_dy(problem, 882);
  for (const std::optional<double> factor : {std::optional<double>(), std::optional(1.0)}) {
    const BackwardForm form{.slot_factor = factor};
    EXPECT_EQ(
        first_difference(GradientValues(problem), run_backward(problem, dy, GetParam(), form)), "");
    EXPECT_EQ(
        first_difference(GradientValues(no_tokens), run_backward(no_tokens, {}, GetParam(), form)),
        "");
  }
}

/// In FP32 the sum of what was there and the gradient is rounded once. reports: A11
TEST_P(CodedGradientEdges, AreAddedToWhatIsThere) {
  MoeProblem problem = problem_of(GetParam(), 890);
  std::ranges::replace(problem.ids, 1, 0);  // expert 1 has no row
  const std::vector<BF16> dy = make_dy(problem, 891);
  constexpr float kInitial = 0.75F;
  GradientValues expected = run_backward(problem, dy, GetParam());
  for (std::vector<float>* weights :
       {&expected.gate, &expected.up, &expected.down, &expected.gate_bias, &expected.up_bias,
        &expected.down_bias}) {
    for (float& value : *weights) value += kInitial;
  }
  for (const std::optional<double> factor :
       {std::optional<double>(), std::optional(1.0 * GetParam().ranks)}) {
    const BackwardForm form{.accumulates = true, .initial = kInitial, .slot_factor = factor};
    EXPECT_EQ(first_difference(expected, run_backward(problem, dy, GetParam(), form)), "");
  }
}

TEST_P(CodedGradientEdges, DestinationsMayLieAtAnyElement) {
  const MoeProblem problem = problem_of(GetParam(), 895);
  const std::vector<BF16> dy = make_dy(problem, 896);
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    BackwardForm form{.wgrad_dtype = dtype};
    const GradientValues expected = run_backward(problem, dy, GetParam(), form);
    form.is_one_element_off = true;
    EXPECT_EQ(first_difference(expected, run_backward(problem, dy, GetParam(), form)), "");
  }
}

}  // namespace
}  // namespace distmoe::conformance
