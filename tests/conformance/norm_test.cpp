// SPDX-License-Identifier: Apache-2.0
//
// Invariant: post-expert RMSNorm, forward and backward, is within 1.5e-3 (relative 2-norm) of the
// numerics contract with FP64 sums, has the same bits for every number of ranks and whatever a slot
// keeps, and is refused where it has no meaning.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>

#include "conformance/moe_gradients.hpp"
#include "conformance/moe_oracle.hpp"
#include "conformance/moe_refusal.hpp"

namespace distmoe::conformance {
namespace {

constexpr double kTolerance = 1.5e-3;
constexpr MoeShape kShape{
    .num_tokens = 37, .hidden_dim = 48, .intermediate_dim = 40, .num_experts = 13, .top_k = 4};

class Norm : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, Norm, testing::ValuesIn(training_cases()), case_name);

CallOptions with_norm(const PostExpertNorm& norm) {
  CallOptions options;
  options.norm = norm;
  return options;
}

MoeProblem problem_with_biases(std::uint64_t seed) {
  MoeProblem problem = make_problem(kShape, RoutePattern::kMixed, seed);
  add_biases(problem, seed + 1);
  return problem;
}

/// y of all ranks in an inference context; `gamma_at` gives the norm its gamma.
std::vector<BF16> forward(const MoeProblem& problem, const MoeCase& moe_case,
                          const CallOptions& call_options,
                          const PackedTensor::ValueAt& gamma_at = {}) {
  const TokenCounts counts = even_split(problem.shape.num_tokens, moe_case.ranks);
  const Config config = config_of(problem, moe_case, {}, counts.back());
  std::vector<BF16> y;
  std::mutex mutex;
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    CallOptions options = call_options;
    Context context = make_context(config, moe_case, communicator);
    const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
    const PlacedTensor gamma(context, DType::kBF16, {problem.shape.hidden_dim}, gamma_at);
    if (gamma_at) options.norm->gamma_D = gamma.view();
    call_experts(context, call, options);
    auto all = gather_rows(*communicator, call.y_rows(), counts, problem.shape.hidden_dim);
    const std::scoped_lock lock(mutex);
    y = std::move(all);
  });
  return y;
}

TEST_P(Norm, ForwardAndBackwardKeepToTheContract) {
  const MoeProblem problem = problem_with_biases(520);
  const std::vector<BF16> dy = make_dy(problem, 521);
  for (const double eps : {1e-6, 0.5}) {
    const GradientOracle oracle =
        gradient_oracle(problem, dy, Rounding::kContract, false, {.eps = eps});
    const CallOptions options = with_norm({.eps = eps});
    EXPECT_LE(relative_error(widened(forward(problem, GetParam(), options)), oracle.y), kTolerance);
    for (const std::optional<double> factor : {std::optional<double>(), std::optional(4.0)}) {
      const BackwardForm form{.slot_factor = factor, .options = options};
      EXPECT_EQ(
          first_violation(problem, run_backward(problem, dy, GetParam(), form), oracle, kTolerance),
          "");
    }
  }
}

/// The oracle with a norm is the slope of its own loss.
TEST(NormOracle, IsTheSlopeOfTheLoss) {
  const MoeProblem problem = make_problem(
      {.num_tokens = 2, .hidden_dim = 4, .intermediate_dim = 3, .num_experts = 3, .top_k = 2},
      RoutePattern::kDistinct, 522);
  const std::vector<BF16> dy = make_dy(problem, 523);
  const OracleNorm norm{.eps = 0.1};
  const auto loss_of_layer = [&](const MoeProblem& layer) {
    const GradientOracle oracle = gradient_oracle(layer, dy, Rounding::kNone, false, norm);
    double loss = 0;
    for (std::size_t i = 0; i < dy.size(); ++i) loss += oracle.y[i] * to_float(dy[i]);
    return loss;
  };
  const GradientOracle oracle = gradient_oracle(problem, dy, Rounding::kNone, false, norm);
  for (const auto& [member, gradient] :
       {std::pair(&MoeProblem::x, &oracle.x), std::pair(&MoeProblem::down, &oracle.down),
        std::pair(&MoeProblem::gate, &oracle.gate)}) {
    for (std::size_t i = 0; i < gradient->size(); ++i) {
      MoeProblem above = problem;
      MoeProblem below = problem;
      const double value = to_float((problem.*member)[i]);
      (above.*member)[i] = to_bf16(value + std::abs(value) * 0x1p-7);
      (below.*member)[i] = to_bf16(value - std::abs(value) * 0x1p-7);
      const double step = to_float((above.*member)[i]) - double{to_float((below.*member)[i])};
      const double slope = (loss_of_layer(above) - loss_of_layer(below)) / step;
      EXPECT_NEAR((*gradient)[i], slope, 2e-3 * (1 + std::abs(slope))) << i;
    }
  }
}

TEST_P(Norm, NoBitDependsOnRanksOrSaving) {
  const MoeProblem problem = problem_with_biases(524);
  const std::vector<BF16> dy = make_dy(problem, 525);
  for (const bool uses_kahan : {false, true}) {
    const CallOptions options =
        with_norm({.eps = 1e-5, .uses_kahan = uses_kahan, .recomputes_rstd = uses_kahan});
    const MoeCase single = single_rank_of(GetParam());
    const std::vector<BF16> y = forward(problem, single, options);
    EXPECT_EQ(first_difference(y, forward(problem, GetParam(), options), kShape.hidden_dim), "");
    const GradientValues expected = run_backward(problem, dy, single, {.options = options});
    for (const std::optional<double> factor : {std::optional<double>(), std::optional(4.0)}) {
      const BackwardForm form{.slot_factor = factor, .options = options};
      EXPECT_EQ(first_difference(expected, run_backward(problem, dy, GetParam(), form)), "");
    }
  }
}

/// Of a saved layer h3 of own tokens is taken from the slot: what has h3 and no W2 in its formula
/// does not read W2 again.
TEST(NormOfASavedLayer, TakesOwnH3FromTheSlot) {
  const MoeProblem problem = problem_with_biases(530);
  const std::vector<BF16> dy = make_dy(problem, 531);
  const CallOptions options = with_norm({.eps = 1e-5});
  const BackwardForm form{.slot_factor = 4.0, .options = options};
  const TokenCounts counts{problem.shape.num_tokens};
  const GradientValues expected = run_backward(problem, dy, {}, form);
  Context context =
      make_context(training_config(problem, {}, form, problem.shape.num_tokens), {}, nullptr);
  const RankCall call = pack_rank(problem, {}, counts, 0);
  const RankGradients gradients(problem, dy, form, counts, 0);
  SavedForward saved =
      saving_routed_experts(context, call.input, call.weights, call.y_view(), options);
  ASSERT_FALSE(context.last_call().is_recomputed);
  std::memset(call.weights.w2_LDF.data, 0xFF, call.weights.w2_LDF.num_bytes());  // NaN
  routed_experts_backward(context, std::move(saved), gradients.dy(), call.weights,
                          gradients.destinations());
  GradientValues actual(problem);
  gradients.copy_to(actual);
  EXPECT_EQ(actual.scores, expected.scores);
  EXPECT_EQ(actual.down, expected.down);
  EXPECT_EQ(actual.down_bias, expected.down_bias);
  EXPECT_TRUE(std::ranges::any_of(actual.x, [](float value) { return std::isnan(value); }));
}

TEST_P(Norm, GammaScalesTheRoutes) {
  const MoeProblem problem = problem_with_biases(526);
  OracleNorm norm{.eps = 1e-5, .gain = {}};
  std::vector<BF16> gamma;
  gamma.reserve(48);
  norm.gain.reserve(48);
  for (std::uint64_t d = 0; d < 48; ++d) {
    gamma.push_back(to_bf16(uniform(527, d)));
    norm.gain.push_back(to_float(to_bf16(to_float(gamma.back()) + 1.0F)));
  }
  const CallOptions options = with_norm({.eps = 1e-5, .gain_center = 1.0});
  const PackedTensor::ValueAt gamma_at = [&](const auto& index) {
    return to_float(gamma[static_cast<std::size_t>(index[0])]);
  };
  const GradientOracle oracle =
      gradient_oracle(problem, make_dy(problem, 528), Rounding::kContract, false, norm);
  EXPECT_LE(relative_error(widened(forward(problem, GetParam(), options, gamma_at)), oracle.y),
            kTolerance);
}

/// One token named by many routes whose sum loses small terms in FP32 without compensation.
TEST_P(Norm, WithKahanKeepsWhatPlainSumsLose) {
  constexpr std::int64_t kRoutes = 64;
  MoeProblem problem = make_constant_problem(fit({.num_tokens = 1,
                                                  .hidden_dim = 2,
                                                  .intermediate_dim = 1,
                                                  .num_experts = kRoutes,
                                                  .top_k = kRoutes},
                                                 GetParam()),
                                             1.0, 1.0, 1.0);
  // xn is 1: the sum of the scores. 2^24 swallows each 1 in a plain sum; -2^24 takes it away again.
  problem.scores.assign(kRoutes, 1.0F);
  problem.scores.front() = 0x1p24F;
  problem.scores.back() = -0x1p24F;
  const CallOptions plain = with_norm({.eps = 1e-12});
  const CallOptions kahan = with_norm({.eps = 1e-12, .uses_kahan = true});
  EXPECT_EQ(to_float(forward(problem, GetParam(), plain)[0]), 0.0F);
  EXPECT_NEAR(to_float(forward(problem, GetParam(), kahan)[0]), kRoutes - 2, 1.0F);
}

/// A call of options that break the contract, refused on every rank.
TEST_P(Norm, WithoutMeaningIsRefused) {
  const MoeProblem problem = problem_with_biases(529);
  const TokenCounts counts = even_split(kShape.num_tokens, GetParam().ranks);
  // A norm, with a gamma of that many elements; of none without one.
  const auto expect_refused = [&](const Config& config, const PostExpertNorm& norm,
                                  std::int64_t gamma_elements, bool saves,
                                  const std::vector<std::string>& words) {
    run_group(GetParam(), [&](const std::shared_ptr<Communicator>& communicator) {
      MoeCase moe_case = GetParam();
      moe_case.combine = config.combine;
      Context context = make_context(config, moe_case, communicator);
      const RankCall call = pack_rank(problem, {}, counts, communicator->rank());
      const PlacedTensor gamma(context, DType::kBF16, {gamma_elements},
                               [](const auto&) { return 1.0; });
      CallOptions options = with_norm(norm);
      if (gamma_elements > 0) options.norm->gamma_D = gamma.view();
      const Outcome outcome = outcome_of([&] {
        if (saves) {
          const SavedForward unused = call_saving(context, call, options);
        } else {
          call_experts(context, call, options);
        }
      });
      expect_error(outcome, ErrorCode::kInvalidArgument, words);
      EXPECT_TRUE(call.is_y_untouched());
      call_experts(context, call);
    });
  };
  const Config inference = config_of(problem, GetParam(), {}, kShape.num_tokens);
  const Config training = training_config(problem, GetParam(), {}, kShape.num_tokens);
  expect_refused(inference, {.eps = 0.0}, 0, false, {"norm.eps is 0"});
  expect_refused(inference, {.eps = NAN}, 0, false, {"norm.eps is nan"});
  expect_refused(inference, {.eps = 1e-50}, 0, false, {"norm.eps is 1e-50", "FP32"});
  expect_refused(inference, {.eps = 1e39}, 0, false, {"norm.eps is 1e+39", "FP32"});
  expect_refused(inference, {.gain_center = -1e39}, 48, false, {"norm.gain_center is -1e+39"});
  expect_refused(inference, {.gain_center = 1.0}, 0, false,
                 {"norm.gain_center is 1", "norm.gamma"});
  expect_refused(inference, {.uses_kahan = true}, 48, false, {"uses_kahan"});
  expect_refused(inference, {}, 47, false, {"norm.gamma must have shape [48]"});
  expect_refused(training, {}, 48, true, {"norm.gamma is for inference"});
  Config lean = training;
  lean.activation_policy = ActivationPolicy::kLean;
  expect_refused(lean, {}, 0, true, {"activation_policy lean"});
  Config per_rank = inference;
  per_rank.combine = Combine::kPerRank;
  expect_refused(per_rank, {}, 0, false, {"per_rank"});
}

}  // namespace
}  // namespace distmoe::conformance
