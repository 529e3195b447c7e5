// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a forward of a low precision computes with the codes of the numerics contract and errs
// by nothing but what FP32 sums and the roundings to BF16 of the contract allow; prepared and BF16
// weights, both pipelines and every layout give the same bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "conformance/coded_oracle.hpp"
#include "conformance/moe_gradients.hpp"
#include "conformance/moe_oracle.hpp"
#include "conformance/moe_refusal.hpp"
#include "conformance/moe_runner.hpp"

namespace distmoe::conformance {
namespace {

class CodedForward : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, CodedForward, testing::ValuesIn(coded_cases()), case_name);

/// Rounding h1 once differently moves a code of h2 by a step now and then: far below a precision's
/// own error, which is 0.02 and more.
constexpr double kTolerance = 4e-3;

MoeProblem problem_of(const MoeCase& moe_case, std::uint64_t seed) {
  MoeProblem problem = make_problem(fit({.num_tokens = 33,
                                         .hidden_dim = 96,
                                         .intermediate_dim = 40,
                                         .num_experts = 7,
                                         .top_k = 3},
                                        moe_case),
                                    RoutePattern::kMixed, seed);
  add_biases(problem, seed + 1);
  return problem;
}

TEST_P(CodedForward, IsTheProductOfTheDecodedOperands) {
  for (const Activation activation : {Activation::kSwiGLU, Activation::kSwiGLUClamped}) {
    MoeProblem problem = problem_of(GetParam(), 600);
    problem.activation = activation;
    problem.limit = 0.7;
    for (const bool is_spread : {false, true}) {
      if (is_spread) spread_magnitudes(problem);
      const std::vector<double> oracle = coded_forward(problem, GetParam().precision);
      EXPECT_LE(relative_error(widened(run(problem, GetParam())), oracle), kTolerance) << is_spread;
    }
  }
}

/// The norm takes h3 as it was rounded; its own sums are FP32.
TEST_P(CodedForward, IsThatOfTheDecodedOperandsWithANormToo) {
  if (GetParam().combine == Combine::kPerRank) GTEST_SKIP() << "a norm needs per_route";
  MoeProblem problem = problem_of(GetParam(), 640);
  for (const bool is_spread : {false, true}) {
    if (is_spread) spread_magnitudes(problem);
    for (const bool has_gamma : {false, true}) {
      OracleNorm norm{.eps = 0.01};
      CallOptions options{.norm = PostExpertNorm{.eps = 0.01}};
      std::vector<BF16> gamma;
      for (std::int64_t i = 0; has_gamma && i < problem.shape.hidden_dim; ++i) {
        gamma.push_back(to_bf16(static_cast<float>(uniform(641, static_cast<std::uint64_t>(i)))));
        norm.gain.push_back(to_float(to_bf16(to_float(gamma.back()) + 1.0F)));
      }
      if (has_gamma) {
        options.norm->gamma_D = {gamma.data(), DType::kBF16, {problem.shape.hidden_dim}};
        options.norm->gain_center = 1.0;
      }
      const std::vector<double> oracle = coded_forward(problem, GetParam().precision, norm);
      EXPECT_LE(relative_error(widened(run(problem, GetParam(), {}, options)), oracle), kTolerance)
          << is_spread << has_gamma;
    }
  }
}

/// Widths of more than one slab, and more rows of an expert than one product takes.
TEST_P(CodedForward, CrossesSlabsAndBlocks) {
  if (GetParam().ranks > 2) GTEST_SKIP() << "one and two ranks say it";
  MoeProblem problem = make_problem(
      {.num_tokens = 530, .hidden_dim = 288, .intermediate_dim = 352, .num_experts = 2, .top_k = 1},
      RoutePattern::kOneExpert, 610);
  // The oracle of a few of them is enough: rows do not depend on each other.
  MoeProblem few = problem;
  few.shape.num_tokens = 6;
  std::copy_n(problem.x.end() - 6 * 288, 6 * 288, few.x.begin());
  std::copy_n(problem.ids.end() - 6, 6, few.ids.begin());
  std::copy_n(problem.scores.end() - 6, 6, few.scores.begin());
  const std::vector<BF16> y = run(problem, GetParam());
  EXPECT_LE(relative_error(widened({y.end() - 6 * 288, y.end()}),
                           coded_forward(few, GetParam().precision)),
            kTolerance);
}

// reports: A46, A47, A50: 90 scales a row and more, and, where blocks are of 16, widths that are no
// multiple of 32.
TEST(CodedForwardOfModelWidths, IsTheProductOfTheDecodedOperands) {
  for (const Precision precision : {Precision::kMXFP8, Precision::kNVFP4, Precision::kMXFP4}) {
    const MoeCase moe_case{.num_threads = 2, .precision = precision};
    std::vector<std::pair<std::int64_t, std::int64_t>> widths{{2880, 64}, {64, 2880}, {704, 192}};
    if (precision == Precision::kNVFP4) {
      widths.insert(widths.end(), {{1072, 48}, {48, 1072}, {112, 176}});
    }
    for (const auto& [hidden_dim, intermediate_dim] : widths) {
      const MoeProblem problem = make_problem_with_biases({.num_tokens = 3,
                                                           .hidden_dim = hidden_dim,
                                                           .intermediate_dim = intermediate_dim,
                                                           .num_experts = 2,
                                                           .top_k = 1},
                                                          RoutePattern::kDistinct, 615);
      EXPECT_LE(relative_error(widened(run(problem, moe_case)), coded_forward(problem, precision)),
                kTolerance)
          << name_of(moe_case) << ", " << hidden_dim << " x " << intermediate_dim;
    }
  }
}

TEST_P(CodedForward, PreparedWeightsPipelinesAndLayoutsChangeNoBit) {
  MoeProblem problem = problem_of(GetParam(), 620);
  spread_magnitudes(problem);
  const std::vector<BF16> expected = run(problem, GetParam());
  for (const Pipeline pipeline : {Pipeline::kStaged, Pipeline::kMega}) {
    for (const bool is_prepared : {false, true}) {
      for (const W13Form w13 : {W13Form::kConcatenated, W13Form::kInterleaved, W13Form::kHalves}) {
        for (const bool is_strided : {false, true}) {
          MoeCase moe_case = GetParam();
          moe_case.pipeline = pipeline;
          moe_case.is_prepared = is_prepared;
          EXPECT_EQ(first_difference(expected,
                                     run(problem, moe_case, {.w13 = w13, .is_strided = is_strided}),
                                     problem.shape.hidden_dim),
                    "")
              << name_of(moe_case);
        }
      }
    }
  }
}

/// A training context computes with tiles, so other bits than inference; alone or saving.
TEST_P(CodedForward, OfATrainingContextHasTheBitsOfItsSavingOne) {
  if (!contract_of(GetParam()).trains || GetParam().combine == Combine::kPerRank) {
    GTEST_SKIP() << "no training";
  }
  MoeProblem problem = problem_of(GetParam(), 630);
  spread_magnitudes(problem);
  const MoeCase& moe_case = GetParam();
  const TokenCounts counts = even_split(problem.shape.num_tokens, moe_case.ranks);
  const auto oracle = coded_gradients(problem, make_dy(problem, 631)).y;
  for (const std::optional<double> factor :
       {std::optional<double>(), std::optional(1.0 * moe_case.ranks)}) {
    const Config config = training_config(problem, moe_case, {.slot_factor = factor}, 33);
    run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
      Context context = make_context(config, moe_case, communicator);
      RankCall call =
          pack_rank(problem, form_of(moe_case, {}, false), counts, communicator->rank());
      call_experts(context, call);
      const std::vector<BF16> alone = call.y_rows();
      call.y.poison();
      const SavedForward saved = call_saving(context, call);
      EXPECT_EQ(context.last_call().is_recomputed, !factor);
      EXPECT_EQ(first_difference(alone, call.y_rows(), problem.shape.hidden_dim), "");
      const auto y = gather_rows(*communicator, alone, counts, problem.shape.hidden_dim);
      EXPECT_LE(relative_error(widened(y), oracle), kTolerance);
    });
  }
}

// reports: A63, A65: NaN, infinite, zero and subnormal rows, which touch their own y alone.
TEST_P(CodedForward, RowsOfNaNInfinityAndZeroStayAlone) {
  const MoeProblem plain = problem_of(GetParam(), 640);
  const std::vector<BF16> expected = run(plain, GetParam());
  MoeProblem problem = plain;
  const std::int64_t width = problem.shape.hidden_dim;
  problem.x_row(3)[5] = BF16{0x7FC0};   // NaN
  problem.x_row(7)[90] = BF16{0xFF80};  // -infinity
  std::fill_n(problem.x_row(11), width, BF16{0});
  std::fill_n(problem.x_row(12), width / 2, BF16{0});   // a zero block beside others
  std::fill_n(problem.x_row(13), width, BF16{0x8003});  // subnormals
  const std::vector<BF16> y = run(problem, GetParam());
  const auto is_enabled = [&](std::int64_t token) {
    return std::any_of(problem.ids.begin() + token * 3, problem.ids.begin() + (token + 1) * 3,
                       [](std::int64_t id) { return id >= 0; });
  };
  for (std::int64_t token = 0; token < problem.shape.num_tokens; ++token) {
    for (std::int64_t d = 0; d < width; ++d) {
      const BF16 value = y[static_cast<std::size_t>(token * width + d)];
      if (token == 3 || token == 7) {
        EXPECT_EQ(std::isnan(to_float(value)), is_enabled(token)) << token << " " << d;
      } else if (token >= 11 && token <= 13) {
        EXPECT_TRUE(std::isfinite(to_float(value))) << token << " " << d;
      } else {
        ASSERT_EQ(value.bits, expected[static_cast<std::size_t>(token * width + d)].bits)
            << token << " " << d;
      }
    }
  }
}

// reports: A65, A72: rows and weights of zeros give zeros.
TEST_P(CodedForward, ZerosGiveZeros) {
  MoeProblem problem = problem_of(GetParam(), 645);
  problem.gate_bias = problem.up_bias = problem.down_bias = {};
  const std::int64_t width = problem.shape.hidden_dim;
  std::fill_n(problem.x_row(4), width, BF16{0});
  // All of expert 1.
  const std::int64_t size = problem.shape.intermediate_dim * width;
  for (std::vector<BF16>* weights : {&problem.gate, &problem.up, &problem.down}) {
    std::fill_n(weights->begin() + size, size, BF16{0});
  }
  std::fill_n(problem.ids.begin() + 3 * 6, 3, 1);  // token 6 names it alone
  const std::vector<BF16> y = run(problem, GetParam());
  for (const std::int64_t token : {4, 6}) {
    for (std::int64_t d = 0; d < width; ++d) {
      ASSERT_EQ(to_float(y[static_cast<std::size_t>(token * width + d)]), 0.0F) << token;
    }
  }
  EXPECT_TRUE(std::ranges::none_of(y, [](BF16 value) { return std::isnan(to_float(value)); }));
}

// reports: A60: a scale of one expert moves no other expert.
TEST_P(CodedForward, NaNWeightsReachTheirExpertsTokensAlone) {
  const MoeProblem plain = problem_of(GetParam(), 650);
  MoeProblem problem = plain;
  problem.down[static_cast<std::size_t>(2 * 96 * problem.shape.intermediate_dim + 4)] =
      BF16{0x7FC0};
  const std::vector<BF16> expected = run(plain, GetParam());
  const std::vector<BF16> y = run(problem, GetParam());
  const std::int64_t width = problem.shape.hidden_dim;
  for (std::int64_t token = 0; token < problem.shape.num_tokens; ++token) {
    const bool is_touched =
        std::find(problem.ids.begin() + token * 3, problem.ids.begin() + (token + 1) * 3, 2) !=
        problem.ids.begin() + (token + 1) * 3;
    const auto begin = static_cast<std::size_t>(token * width);
    bool has_nan = false;
    bool is_equal = true;
    for (std::size_t i = begin; i < begin + static_cast<std::size_t>(width); ++i) {
      has_nan = has_nan || std::isnan(to_float(y[i]));
      is_equal = is_equal && y[i].bits == expected[i].bits;
    }
    EXPECT_EQ(has_nan, is_touched) << token;
    EXPECT_EQ(is_equal, !is_touched) << token;
  }
}

}  // namespace
}  // namespace distmoe::conformance
