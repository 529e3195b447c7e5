// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a call refuses prepared weights of another format, layout or shape and scales that are
// no numbers, with the values, before anything runs.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "conformance/moe_oracle.hpp"
#include "conformance/moe_problem.hpp"
#include "conformance/moe_refusal.hpp"
#include "conformance/moe_runner.hpp"
#include "core/check.hpp"
#include "distmoe/prepared_weight.hpp"
#include "plan/option_names.hpp"

namespace distmoe {
namespace {

using conformance::expect_error;
using conformance::outcome_of;

class PreparedCall : public testing::Test {
 protected:
  static constexpr std::int64_t kHidden = 64;
  static conformance::MoeProblem problem() {
    return conformance::make_problem({.num_tokens = 4,
                                      .hidden_dim = kHidden,
                                      .intermediate_dim = 64,
                                      .num_experts = 2,
                                      .top_k = 1},
                                     conformance::RoutePattern::kDistinct, 940);
  }
  /// A call of a context of `precision` with weights that `change` has changed.
  template <typename Change>
  void expect_refused(Precision precision, bool inference, const Change& change,
                      const std::vector<std::string>& words) {
    const conformance::MoeProblem p = problem();
    const conformance::MoeCase moe_case{.precision = precision};
    Config config = conformance::config_of(p, moe_case, {}, 4);
    config.inference = inference;
    Context context = conformance::make_context(config, moe_case, nullptr);
    conformance::CallForm form;
    form.prepared = BlockScaledConfig{precision == Precision::kBF16 ? Precision::kMXFP8 : precision,
                                      inference || precision == Precision::kBF16};
    conformance::RankCall call = conformance::pack_rank(p, form, {4}, 0);
    ExpertWeights weights = call.weights;
    change(weights, call);
    expect_error(outcome_of([&] { routed_experts(context, call.input, weights, call.y_view()); }),
                 ErrorCode::kInvalidArgument, words);
    EXPECT_TRUE(call.is_y_untouched());
  }
};

TEST_F(PreparedCall, OfAnotherFormatOrShapeIsRefusedWithBoth) {
  using Call = conformance::RankCall;
  const auto as_it_is = [](ExpertWeights&, Call&) {};
  expect_refused(Precision::kBF16, true, as_it_is, {"w13", "prepared for mxfp8", "computes bf16"});
  PreparedWeight other;
  const auto prepare_as = [&](BlockScaledConfig config) {
    return [&other, config](ExpertWeights& weights, Call& call) {
      other = prepare_block_scaled_weight(call.w13.view(), config);
      weights.prepared_w13 = other.view();
    };
  };
  expect_refused(Precision::kMXFP8, true, prepare_as({Precision::kMXFP8, false}),
                 {"prepared for mxfp8 training", "computes mxfp8 inference"});
  expect_refused(Precision::kMXFP8, false, prepare_as({Precision::kMXFP8, true}),
                 {"prepared for mxfp8 inference", "computes mxfp8 training"});
  expect_refused(Precision::kNVFP4, true, prepare_as({Precision::kMXFP4, true}),
                 {"prepared for mxfp4", "computes nvfp4"});
  expect_refused(Precision::kMXFP8, true,
                 prepare_as({Precision::kMXFP8, true, GateUpLayout::kInterleaved}),
                 {"gate_up_layout interleaved", "concatenated"});
  expect_refused(
      Precision::kMXFP8, true,
      [](ExpertWeights& weights, Call&) { std::swap(weights.prepared_w13, weights.prepared_w2); },
      {"codes of prepared w13", "[2, 128, 64]", "[2, 64, 64]"});
  expect_refused(Precision::kMXFP8, true,
                 [](ExpertWeights& weights, Call&) { weights.prepared_w2.scales.shape[2] = 1; },
                 {"scales of prepared w2", "[2, 64, 2]", "[2, 64, 1]"});
}

// reports: A74: an array that has no use, or no address of its type, is refused like a missing one.
TEST_F(PreparedCall, GlobalScalesAreThoseOfTheFormat) {
  using Call = conformance::RankCall;
  std::vector<float> ones(5, 1.0F);
  const TensorView scales{ones.data(), DType::kF32, {2, 1}};
  expect_refused(
      Precision::kMXFP8, true,
      [&](ExpertWeights& weights, Call&) { weights.prepared_w13.global_scales = scales; },
      {"global scales of prepared w13", "[2, 1]"});
  expect_refused(Precision::kNVFP4, true,
                 [](ExpertWeights& weights, Call&) { weights.prepared_w13.global_scales = {}; },
                 {"global scales of prepared w13", "f32 [2, 1]"});
  expect_refused(Precision::kNVFP4, true,
                 [&](ExpertWeights& weights, Call&) {
                   weights.prepared_w2.global_scales = {ones.data(), DType::kF32, {2, 2}};
                 },
                 {"prepared w2 has global scales", "[2, 2]"});
  expect_refused(Precision::kNVFP4, true,
                 [&](ExpertWeights& weights, Call&) {
                   weights.prepared_w13.global_scales = scales;
                   weights.prepared_w13.global_scales.data =
                       reinterpret_cast<std::byte*>(ones.data()) + 2;
                 },
                 {"global scales of prepared w13", "no address"});
}

TEST_F(PreparedCall, WeightsAreGivenOnceAndThoseOfNVFP4Prepared) {
  using Call = conformance::RankCall;
  expect_refused(Precision::kMXFP8, true,
                 [](ExpertWeights& weights, Call& call) { weights.w2_LDF = call.w2.view(); },
                 {"w2 is given twice", "bf16 [2, 64, 64]"});
  expect_refused(
      Precision::kNVFP4, true,
      [](ExpertWeights& weights, Call& call) {
        weights.prepared_w13 = {};
        weights.w13_L2FD = call.w13.view();
      },
      {"w13 is bf16 [2, 128, 64]", "nvfp4 needs it prepared", "prepare_block_scaled_weight"});
  expect_refused(
      Precision::kNVFP4, true,
      [](ExpertWeights& weights, Call& call) {
        weights.prepared_w2 = {};
        weights.w2_LDF = call.w2.view();
      },
      {"w2 is bf16 [2, 64, 64]", "nvfp4 needs it prepared", "prepare_block_scaled_weight"});
  expect_refused(Precision::kNVFP4, true,
                 [](ExpertWeights& weights, Call&) { weights.prepared_w2 = {}; },
                 {"w2 is not given", "nvfp4 needs it prepared"});
}

/// Of one rank: every rank hears of them in the same call, and the next call works.
TEST_F(PreparedCall, OfOneRankAreRefusedOnEveryRank) {
  conformance::MoeProblem p = conformance::make_problem({.num_tokens = 9,
                                                         .hidden_dim = kHidden,
                                                         .intermediate_dim = 64,
                                                         .num_experts = 6,
                                                         .top_k = 2},
                                                        conformance::RoutePattern::kDistinct, 941);
  using Change = std::function<void(PreparedWeightView&)>;
  const auto first_scale = [](const PreparedWeightView& w) {
    return static_cast<std::uint8_t*>(w.scales.data);
  };
  for (const Precision precision : {Precision::kMXFP8, Precision::kNVFP4, Precision::kMXFP4}) {
    const conformance::MoeCase one{.precision = precision, .is_prepared = true};
    const std::vector<BF16> expected = conformance::run(p, one);
    const std::pair<Change, const char*> changes[] = {
        {[&](PreparedWeightView& w) { *first_scale(w) = 255, w.has_known_scales = false; },
         "scale [0, 0, 0] of prepared w2"},
        {[](PreparedWeightView& w) { w.config.inference = false; }, "is prepared for"},
        {[](PreparedWeightView& w) { w.codes.shape[1] -= 32; }, "codes of prepared w2"}};
    for (const auto& [change, words] : changes) {
      const conformance::MoeCase three = conformance::with_ranks(one, 3);
      conformance::run_group(three, [&](const std::shared_ptr<Communicator>& communicator) {
        Context context =
            conformance::make_context(conformance::config_of(p, three, {}, 3), three, communicator);
        conformance::RankCall call =
            conformance::pack_rank(p, conformance::form_of(three), {3, 3, 3}, communicator->rank());
        const ExpertWeights right = call.weights;
        ExpertWeights wrong = call.weights;
        const std::uint8_t scale = *first_scale(right.prepared_w2);
        if (communicator->rank() == 1) change(wrong.prepared_w2);
        expect_error(outcome_of([&] { routed_experts(context, call.input, wrong, call.y_view()); }),
                     ErrorCode::kInvalidArgument, {"rank 1", words});
        EXPECT_TRUE(call.is_y_untouched());
        *first_scale(right.prepared_w2) = scale;
        routed_experts(context, call.input, right, call.y_view());
        const auto y = conformance::gather_rows(*communicator, call.y_rows(), {3, 3, 3}, kHidden);
        EXPECT_EQ(conformance::first_difference(expected, y, kHidden), "");
      });
    }
  }
}

// reports: A69, A72
TEST_F(PreparedCall, GlobalScalesThatAreNoNumbersAreRefusedWithTheirPlace) {
  using Call = conformance::RankCall;
  for (const float scale : {0.0F, -1.0F, INFINITY, NAN}) {
    expect_refused(Precision::kNVFP4, true,
                   [&](ExpertWeights& weights, Call&) {
                     static_cast<float*>(weights.prepared_w13.global_scales.data)[1] = scale;
                   },
                   {"global scale [1, 0] of prepared w13", "finite and positive"});
  }
}

// reports: A60, A69: of codes that come from elsewhere; those that are known to be quantised from
// weights that were no numbers reach the results of their expert, as coded_forward_test says.
TEST_F(PreparedCall, BlockScalesThatAreNoNumbersAreRefusedWithTheirPlace) {
  using Call = conformance::RankCall;
  struct Case {
    BlockScaledConfig config{};
    int byte = 0;
    const char* legal = "";
  };
  for (const Case& c : {Case{{Precision::kMXFP8, true}, 255, "0 to 254"},
                        Case{{Precision::kMXFP8, false}, 255, "0 to 254"},
                        Case{{Precision::kMXFP4, true}, 253, "0 to 252"},
                        Case{{Precision::kNVFP4, true}, 0x7F, "0 to 126"},
                        Case{{Precision::kNVFP4, true}, 0xFF, "0 to 126"}}) {
    const auto change = [&](PreparedWeightView& weight, std::int64_t row) {
      auto* bytes = static_cast<std::uint8_t*>(weight.scales.data);
      bytes[weight.scales.strides[0] + row * weight.scales.strides[1] + 1] =
          static_cast<std::uint8_t>(c.byte);
      weight.has_known_scales = false;
    };
    expect_refused(c.config.format, c.config.inference,
                   [&](ExpertWeights& weights, Call&) { change(weights.prepared_w13, 3); },
                   {"scale [1, 3, 1] of prepared w13", option_name(c.config.format),
                    concat("byte ", c.byte), c.legal});
    expect_refused(c.config.format, c.config.inference,
                   [&](ExpertWeights& weights, Call&) { change(weights.prepared_w2, 1); },
                   {"scale [1, 1, 1] of prepared w2", concat("byte ", c.byte)});
  }
}

/// Looked at or not, weights without NaN give the same.
TEST_F(PreparedCall, UnknownScalesThatAreNumbersAreTaken) {
  const conformance::MoeProblem p = problem();
  const conformance::MoeCase moe_case{.precision = Precision::kMXFP8, .is_prepared = true};
  Context context =
      conformance::make_context(conformance::config_of(p, moe_case, {}, 4), moe_case, nullptr);
  conformance::RankCall call = conformance::pack_rank(p, conformance::form_of(moe_case), {4}, 0);
  EXPECT_TRUE(call.weights.prepared_w13.has_known_scales);
  routed_experts(context, call.input, call.weights, call.y_view());
  const std::vector<BF16> expected = call.y_rows();
  call.weights.prepared_w13.has_known_scales = call.weights.prepared_w2.has_known_scales = false;
  call.y.poison();
  routed_experts(context, call.input, call.weights, call.y_view());
  EXPECT_EQ(conformance::first_difference(expected, call.y_rows(), kHidden), "");
}

/// A checkpoint may bring one factor for the gate and another for the up rows.
TEST_F(PreparedCall, GateAndUpMayHaveFactorsOfTheirOwn) {
  conformance::MoeProblem p = problem();
  const conformance::MoeCase moe_case{.precision = Precision::kNVFP4};
  Context context =
      conformance::make_context(conformance::config_of(p, moe_case, {}, 4), moe_case, nullptr);
  conformance::CallForm form;
  form.prepared = BlockScaledConfig{Precision::kNVFP4, true};
  conformance::RankCall call = conformance::pack_rank(p, form, {4}, 0);
  routed_experts(context, call.input, call.weights, call.y_view());
  const std::vector<BF16> expected = call.y_rows();
  // up twice as large is h2 twice as large, and so is everything behind it.
  const auto* one = static_cast<const float*>(call.weights.prepared_w13.global_scales.data);
  const std::vector<float> two{one[0], 2 * one[0], one[1], 2 * one[1]};
  call.weights.prepared_w13.global_scales = {two.data(), DType::kF32, {2, 2}};
  call.y.poison();
  routed_experts(context, call.input, call.weights, call.y_view());
  const std::vector<BF16> doubled = call.y_rows();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(to_float(doubled[i]), 2 * to_float(expected[i]));
  }
}

}  // namespace
}  // namespace distmoe
