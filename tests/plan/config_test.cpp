// SPDX-License-Identifier: Apache-2.0
//
// Invariant: validate() accepts exactly what the contract allows, reports the first broken rule and
// puts the offending value and the legal range into the message.
#include "distmoe/config.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>

#include "plan/plan_testing.hpp"

namespace distmoe {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

template <typename Change, typename... Words>
void expect_refused(const Change& change, const Words&... words) {
  Config config = small_config();
  change(config);
  expect_error(
      ErrorCode::kInvalidArgument, [&] { validate(config); }, words...);
}

template <typename Change>
void expect_legal(const Change& change) {
  Config config = small_config();
  change(config);
  EXPECT_NO_THROW(validate(config));
}

TEST(ConfigRules, SmallConfigIsLegalAndDefaultConfigIsNot) {
  EXPECT_NO_THROW(validate(small_config()));
  expect_error(
      ErrorCode::kInvalidArgument, [] { validate(Config{}); }, "max_tokens is 0",
      "1 to 2147483647");
}

TEST(ConfigRules, SizesMustBePositive) {
  expect_refused([](Config& c) { c.max_tokens = -7; }, "max_tokens is -7", "1 to 2147483647");
  expect_refused([](Config& c) { c.hidden_dim = 0; }, "hidden_dim is 0", "1 to ");
  expect_refused([](Config& c) { c.intermediate_dim = -1; }, "intermediate_dim is -1", "1 to ");
  expect_refused([](Config& c) { c.top_k = 0; }, "top_k is 0", "1 to ");
  expect_refused([](Config& c) { c.num_experts = -3; }, "num_experts is -3", "1 to 2147483647");
  expect_refused([](Config& c) { c.max_moe_layers_per_activation_slot = 0; },
                 "max_moe_layers_per_activation_slot is 0", "1 to ");
}

TEST(ConfigRules, TokensAndExpertsMustFitInThirtyTwoBits) {
  expect_legal([](Config& c) { c.max_tokens = 2147483647; });
  expect_legal([](Config& c) { c.num_experts = 2147483647; });
  expect_refused([](Config& c) { c.max_tokens = 2147483648; }, "max_tokens is 2147483648");
  expect_refused([](Config& c) { c.num_experts = 2147483648; }, "num_experts is 2147483648");
}

TEST(ConfigRules, TopKMayEqualTheExpertsButNotExceedThem) {
  expect_legal([](Config& c) { c.top_k = 10; });
  expect_refused([](Config& c) { c.top_k = 11; }, "top_k is 11", "num_experts, which is 10");
}

TEST(ConfigRules, TopKOfEveryPublicModelIsLegal) {  // reports: A53
  for (const std::int64_t top_k : {1, 2, 8, 9, 10, 16, 22, 32, 512}) {
    expect_legal([&](Config& c) { c.num_experts = 512, c.top_k = top_k; });
  }
  expect_refused([](Config& c) { c.num_experts = 512, c.top_k = 513; }, "513", "512");
}

TEST(ConfigRules, OddWidthsAreLegalInBF16) {  // reports: A46
  for (const std::int64_t width : {1, 16, 65, 464, 576, 1025, 1856, 2880}) {
    expect_legal([&](Config& c) { c.hidden_dim = width, c.intermediate_dim = width; });
  }
}

TEST(ConfigRules, SlotControlsAreCheckedAndExclusive) {
  expect_legal([](Config& c) { c.activation_slot_bytes = 0; });
  expect_legal([](Config& c) { c.activation_slot_capacity_factor = 0.0; });
  expect_refused([](Config& c) { c.activation_slot_bytes = -128; }, "activation_slot_bytes is -128",
                 "0 or more");
  for (const double factor : {-0.5, kInf, kNaN}) {
    expect_refused([&](Config& c) { c.activation_slot_capacity_factor = factor; },
                   "activation_slot_capacity_factor is ", "finite and 0 or more");
  }
  expect_refused(
      [](Config& c) { c.activation_slot_bytes = 4096, c.activation_slot_capacity_factor = 0.25; },
      "4096", "0.25", "mutually exclusive");
}

TEST(ConfigRules, TrainingNeedsASlotAndInferenceIgnoresTheirNumber) {
  expect_refused([](Config& c) { c.num_activation_slots = 0; }, "num_activation_slots is 0",
                 "1 to ");
  expect_legal([](Config& c) { c.inference = true, c.num_activation_slots = 0; });
  expect_legal([](Config& c) { c.inference = true, c.num_activation_slots = 9; });
  expect_refused([](Config& c) { c.inference = true, c.num_activation_slots = -1; },
                 "num_activation_slots is -1", "0 or more");
}

TEST(ConfigRules, InferenceRefusesSlotControls) {
  expect_refused([](Config& c) { c.inference = true, c.activation_slot_bytes = 512; },
                 "activation_slot_bytes is 512", "does not retain saved activations");
  expect_refused([](Config& c) { c.inference = true, c.activation_slot_capacity_factor = 1.0; },
                 "activation_slot_capacity_factor is 1", "does not retain saved activations");
}

TEST(ConfigRules, ScratchFactorsAndSwigluNumbersAreFiniteAndPositive) {
  expect_legal([](Config& c) { c.device_scratch_capacity_factor = 0.25; });
  for (const double value : {0.0, -1.5, kInf, kNaN}) {
    expect_refused([&](Config& c) { c.device_scratch_capacity_factor = value; },
                   "device_scratch_capacity_factor is ", "finite and positive");
    expect_refused(
        [&](Config& c) {
          c.host_scratch = HostScratch{value, true};
        },
        "total_scratch_capacity_factor is ", "finite and positive");
    expect_refused([&](Config& c) { c.swiglu_alpha = value; }, "swiglu_alpha is ",
                   "finite and positive");
    expect_refused([&](Config& c) { c.swiglu_limit = value; }, "swiglu_limit is ",
                   "finite and positive");
  }
  expect_refused([](Config& c) { c.swiglu_limit = -1.5; }, "swiglu_limit is -1.5");
  expect_refused([](Config& c) { c.swiglu_limit = 1e39; }, "swiglu_limit is 1e+39", "FP32");
  expect_refused([](Config& c) { c.swiglu_alpha = 1e-50; }, "swiglu_alpha is 1e-50", "FP32");
}

TEST(ConfigRules, NumSmsAndTimeoutArePositive) {
  expect_legal([](Config& c) { c.num_sms = 1; });
  expect_refused([](Config& c) { c.num_sms = 0; }, "num_sms is 0", "1 to 2147483647");
  expect_refused([](Config& c) { c.timeout = std::chrono::milliseconds(0); }, "timeout is 0 ms",
                 "more than 0");
  expect_refused([](Config& c) { c.timeout = std::chrono::milliseconds(-5); }, "timeout is -5 ms");
}

TEST(ConfigRules, BlockScaledPrecisionsNeedTheirBlockMultiple) {
  expect_legal([](Config& c) { c.precision = Precision::kMXFP8; });
  expect_refused([](Config& c) { c.precision = Precision::kMXFP8, c.hidden_dim = 48; },
                 "hidden_dim is 48", "mxfp8", "multiple of 32");
  expect_refused([](Config& c) { c.precision = Precision::kMXFP8, c.intermediate_dim = 33; },
                 "intermediate_dim is 33", "multiple of 32");
  const auto nvfp4 = [](Config& c) { c.precision = Precision::kNVFP4, c.inference = true; };
  expect_legal([&](Config& c) { nvfp4(c), c.hidden_dim = 48; });
  expect_refused([&](Config& c) { nvfp4(c), c.intermediate_dim = 40; }, "intermediate_dim is 40",
                 "nvfp4", "multiple of 16");
  const auto mxfp4 = [](Config& c) { c.precision = Precision::kMXFP4, c.inference = true; };
  expect_legal(mxfp4);
  expect_refused([&](Config& c) { mxfp4(c), c.hidden_dim = 48; }, "hidden_dim is 48", "mxfp4",
                 "multiple of 32");
}

TEST(ConfigRules, FourBitPrecisionsAreForInference) {
  expect_refused([](Config& c) { c.precision = Precision::kNVFP4; }, "nvfp4", "inference-only");
  expect_refused([](Config& c) { c.precision = Precision::kMXFP4; }, "mxfp4", "inference-only");
}

TEST(ConfigRules, LeanIsForBF16Training) {
  const auto lean = [](Config& c) { c.activation_policy = ActivationPolicy::kLean; };
  expect_legal(lean);
  expect_refused([&](Config& c) { lean(c), c.inference = true; }, "lean", "inference");
  expect_refused([&](Config& c) { lean(c), c.precision = Precision::kMXFP8; }, "lean", "mxfp8");
}

TEST(ConfigRules, TheFirstBrokenRuleWins) {
  expect_refused(
      [](Config& c) {
        c.hidden_dim = 0, c.top_k = 99, c.num_activation_slots = 0;
        c.device_scratch_capacity_factor = -1.0;
      },
      "hidden_dim is 0");
  expect_refused([](Config& c) { c.top_k = 99, c.device_scratch_capacity_factor = -1.0; },
                 "top_k is 99");
}

TEST(ConfigRules, PipelineHasNoEffectOnBF16) {
  expect_legal([](Config& c) { c.pipeline = Pipeline::kMega; });
}

TEST(ConfigRules, ChoicesAreOfTheirEnumeration) {
  expect_refused([](Config& c) { c.precision = Precision(7); }, "precision is 7",
                 "bf16, mxfp8, nvfp4, mxfp4");
  expect_refused([](Config& c) { c.precision = Precision(-1); }, "precision is -1");
  expect_refused([](Config& c) { c.pipeline = Pipeline(7); }, "pipeline is 7", "staged, mega");
  expect_refused([](Config& c) { c.activation_policy = ActivationPolicy(7); },
                 "activation_policy is 7", "full, lean");
  expect_refused([](Config& c) { c.combine = Combine(7); }, "combine is 7", "per_route, per_rank");
  expect_refused([](Config& c) { c.activation = Activation(7); }, "activation is 7",
                 "swiglu, swiglu_clamped");
  expect_refused([](Config& c) { c.wgrad_dtype = WgradDType(7); }, "wgrad_dtype is 7",
                 "none, bf16, fp32");
  expect_refused([](Config& c) { c.gate_up_layout = GateUpLayout(7); }, "gate_up_layout is 7",
                 "concatenated, interleaved");
  expect_refused([](Config& c) { c.kernel_choice = KernelChoice(7); }, "kernel_choice is 7",
                 "tuned, fixed");
}

TEST(ConfigRules, AnUnknownChoiceIsReportedBeforeTheRulesThatUseIt) {
  expect_refused(
      [](Config& c) { c.precision = Precision::kNVFP4, c.activation_policy = ActivationPolicy(7); },
      "activation_policy is 7");
}

}  // namespace
}  // namespace distmoe
