// SPDX-License-Identifier: Apache-2.0
//
// Invariant: every field of a configuration that ranks must share is in the record that they
// compare, under its own name; what may differ between ranks is not. Values are said in full,
// choices by name.
#include "runtime/config_record.hpp"

#include <gtest/gtest.h>

namespace distmoe {
namespace {

struct Change {
  const char* field;
  void (*apply)(Config&);
};

const Change kChanges[] = {
    {"max_tokens", [](Config& c) { c.max_tokens = 5; }},
    {"hidden_dim", [](Config& c) { c.hidden_dim = 5; }},
    {"intermediate_dim", [](Config& c) { c.intermediate_dim = 5; }},
    {"top_k", [](Config& c) { c.top_k = 5; }},
    {"num_experts", [](Config& c) { c.num_experts = 5; }},
    {"max_moe_layers_per_activation_slot",
     [](Config& c) { c.max_moe_layers_per_activation_slot = 5; }},
    {"device_scratch_capacity_factor", [](Config& c) { c.device_scratch_capacity_factor = 5; }},
    {"activation_slot_bytes", [](Config& c) { c.activation_slot_bytes = 0; }},
    {"activation_slot_capacity_factor", [](Config& c) { c.activation_slot_capacity_factor = 0; }},
    {"num_activation_slots", [](Config& c) { c.num_activation_slots = 5; }},
    {"activation_policy", [](Config& c) { c.activation_policy = ActivationPolicy::kLean; }},
    {"distinct_experts", [](Config& c) { c.distinct_experts = false; }},
    {"host_scratch", [](Config& c) { c.host_scratch = HostScratch{}; }},
    {"precision", [](Config& c) { c.precision = Precision::kNVFP4; }},
    {"pipeline", [](Config& c) { c.pipeline = Pipeline::kMega; }},
    {"combine", [](Config& c) { c.combine = Combine::kPerRank; }},
    {"activation", [](Config& c) { c.activation = Activation::kSwiGLUClamped; }},
    {"swiglu_alpha", [](Config& c) { c.swiglu_alpha = 5; }},
    {"swiglu_limit", [](Config& c) { c.swiglu_limit = 5; }},
    {"wgrad_dtype", [](Config& c) { c.wgrad_dtype = WgradDType::kF32; }},
    {"inference", [](Config& c) { c.inference = true; }},
    {"num_sms", [](Config& c) { c.num_sms = 5; }},
    {"gate_up_layout", [](Config& c) { c.gate_up_layout = GateUpLayout::kInterleaved; }},
    {"kernel_choice", [](Config& c) { c.kernel_choice = KernelChoice::kFixed; }},
    {"timeout (ms)", [](Config& c) { c.timeout = std::chrono::milliseconds(0); }},
};

TEST(ConfigRecord, EveryFieldThatRanksShareIsComparedByName) {
  const ConfigRecord mine = record_config({}, {});
  for (const Change& change : kChanges) {
    Config config;
    change.apply(config);
    const std::string text = first_difference(mine, record_config(config, {}));
    EXPECT_EQ(text.rfind(std::string(change.field) + ": ", 0), 0u)
        << change.field << " gave: " << text;
    EXPECT_NE(text.find(" against "), std::string::npos) << text;
  }
  Config deep;
  deep.host_scratch = HostScratch{};
  Config deeper = deep;
  deeper.host_scratch->total_scratch_capacity_factor = 5;
  EXPECT_EQ(first_difference(record_config(deep, {}), record_config(deeper, {})),
            "total_scratch_capacity_factor: 16 against 5");
  EXPECT_EQ(first_difference(mine, record_config({}, {.backend = BackendKind::kCuda})),
            "backend: cpu against cuda");
}

TEST(ConfigRecord, ValuesAreSaidInFullAndChoicesByName) {
  const auto difference = [](auto apply_mine, auto apply_theirs) {
    Config mine;
    Config theirs;
    apply_mine(mine);
    apply_theirs(theirs);
    return first_difference(record_config(mine, {}), record_config(theirs, {}));
  };
  const auto change = [&](auto apply) { return difference([](Config&) {}, apply); };
  EXPECT_EQ(difference([](Config& c) { c.max_tokens = 1048576; },
                       [](Config& c) { c.max_tokens = 1048577; }),
            "max_tokens: 1048576 against 1048577");
  EXPECT_EQ(change([](Config& c) { c.activation_slot_bytes = std::int64_t{1} << 40; }),
            "activation_slot_bytes: none against 1099511627776");
  EXPECT_EQ(change([](Config& c) { c.device_scratch_capacity_factor = 2.0000001; }),
            "device_scratch_capacity_factor: 2 against 2.0000001");
  EXPECT_EQ(change([](Config& c) { c.activation_slot_capacity_factor = 0.5; }),
            "activation_slot_capacity_factor: none against 0.5");
  EXPECT_EQ(change([](Config& c) { c.timeout = std::chrono::milliseconds(1234567); }),
            "timeout (ms): none against 1234567");
  EXPECT_EQ(change([](Config& c) { c.distinct_experts = false; }),
            "distinct_experts: true against false");
  EXPECT_EQ(change([](Config& c) { c.activation_policy = ActivationPolicy::kLean; }),
            "activation_policy: full against lean");
  EXPECT_EQ(change([](Config& c) { c.precision = Precision::kNVFP4; }),
            "precision: bf16 against nvfp4");
  EXPECT_EQ(change([](Config& c) { c.pipeline = Pipeline::kMega; }),
            "pipeline: staged against mega");
  EXPECT_EQ(change([](Config& c) { c.combine = Combine::kPerRank; }),
            "combine: per_route against per_rank");
  EXPECT_EQ(change([](Config& c) { c.activation = Activation::kSwiGLUClamped; }),
            "activation: swiglu against swiglu_clamped");
  EXPECT_EQ(change([](Config& c) { c.wgrad_dtype = WgradDType::kF32; }),
            "wgrad_dtype: none against fp32");
  EXPECT_EQ(change([](Config& c) { c.gate_up_layout = GateUpLayout::kInterleaved; }),
            "gate_up_layout: concatenated against interleaved");
  EXPECT_EQ(change([](Config& c) { c.kernel_choice = KernelChoice::kFixed; }),
            "kernel_choice: tuned against fixed");
}

TEST(ConfigRecord, EqualConfigurationsAndOtherThreadCountsDoNotDiffer) {
  EXPECT_EQ(first_difference(record_config({}, {}), record_config({}, {.num_threads = 7})), "");
  Config config;
  config.host_scratch = HostScratch{.prefetch = true};
  Config quiet = config;
  quiet.host_scratch->prefetch = false;  // a rank's own matter: it moves no byte between ranks
  EXPECT_EQ(first_difference(record_config(config, {}), record_config(quiet, {})), "");
}

}  // namespace
}  // namespace distmoe
