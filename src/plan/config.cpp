// SPDX-License-Identifier: Apache-2.0
//
// The rules of a configuration, in the order in which they are reported. Rules that need the number
// of ranks are plan_memory's.
#include "distmoe/config.hpp"

#include <cmath>
#include <limits>

#include "core/check.hpp"
#include "formats/block_format.hpp"
#include "plan/option_names.hpp"

namespace distmoe {
namespace {

// Ids, tokens and routes of a token travel as int32.
constexpr std::int64_t kMaxIndex = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMaxSize = std::numeric_limits<std::int64_t>::max();

void check_size(const char* name, std::int64_t value, std::int64_t most) {
  DISTMOE_CHECK(value >= 1 && value <= most, kInvalidArgument, name, " is ", value,
                "; legal is 1 to ", most);
}

void check_positive(const char* name, double value) {
  DISTMOE_CHECK(std::isfinite(value) && value > 0.0, kInvalidArgument, name, " is ", value,
                "; it must be finite and positive");
}

/// The same of what is computed with in FP32.
void check_positive_fp32(const char* name, double value) {
  const auto rounded = static_cast<float>(value);
  DISTMOE_CHECK(std::isfinite(rounded) && rounded > 0.0F, kInvalidArgument, name, " is ", value,
                "; it must be finite and positive, also in FP32");
}

void validate_sizes(const Config& config) {
  check_size("max_tokens", config.max_tokens, kMaxIndex);
  check_size("hidden_dim", config.hidden_dim, kMaxSize);
  check_size("intermediate_dim", config.intermediate_dim, kMaxSize);
  check_size("top_k", config.top_k, kMaxSize);
  check_size("num_experts", config.num_experts, kMaxIndex);
  DISTMOE_CHECK(config.top_k <= config.num_experts, kInvalidArgument, "top_k is ", config.top_k,
                "; legal is 1 to num_experts, which is ", config.num_experts);
  check_size("max_moe_layers_per_activation_slot", config.max_moe_layers_per_activation_slot,
             kMaxSize);
}

void validate_slots(const Config& config) {
  const auto& bytes = config.activation_slot_bytes;
  const auto& factor = config.activation_slot_capacity_factor;
  DISTMOE_CHECK(!bytes || *bytes >= 0, kInvalidArgument, "activation_slot_bytes is ", *bytes,
                "; it must be 0 or more");
  DISTMOE_CHECK(!factor || (std::isfinite(*factor) && *factor >= 0.0), kInvalidArgument,
                "activation_slot_capacity_factor is ", *factor,
                "; it must be finite and 0 or more");
  DISTMOE_CHECK(!bytes || !factor, kInvalidArgument, "activation_slot_bytes (", *bytes,
                ") and activation_slot_capacity_factor (", *factor,
                ") are mutually exclusive; give one of them or neither");
  const std::int64_t slots = config.num_activation_slots;
  if (config.inference) {
    DISTMOE_CHECK(slots >= 0, kInvalidArgument, "num_activation_slots is ", slots,
                  "; an inference context ignores it, but it must be 0 or more");
    DISTMOE_CHECK(!bytes, kInvalidArgument, "activation_slot_bytes is ", *bytes,
                  "; an inference context does not retain saved activations, legal is none");
    DISTMOE_CHECK(!factor, kInvalidArgument, "activation_slot_capacity_factor is ", *factor,
                  "; an inference context does not retain saved activations, legal is none");
  } else {
    check_size("num_activation_slots", slots, kMaxSize);
  }
}

void validate_factors(const Config& config) {
  check_positive("device_scratch_capacity_factor", config.device_scratch_capacity_factor);
  if (config.host_scratch) {
    check_positive("total_scratch_capacity_factor",
                   config.host_scratch->total_scratch_capacity_factor);
  }
  check_positive_fp32("swiglu_alpha", config.swiglu_alpha);
  check_positive_fp32("swiglu_limit", config.swiglu_limit);
}

void validate_choices(const Config& config) {
  check_choice("precision", config.precision);
  check_choice("pipeline", config.pipeline);
  check_choice("activation_policy", config.activation_policy);
  check_choice("combine", config.combine);
  check_choice("activation", config.activation);
  check_choice("wgrad_dtype", config.wgrad_dtype);
  check_choice("gate_up_layout", config.gate_up_layout);
  check_choice("kernel_choice", config.kernel_choice);
}

void check_multiple(const char* precision, const char* name, std::int64_t value,
                    std::int64_t block) {
  DISTMOE_CHECK(value % block == 0, kInvalidArgument, name, " is ", value, "; precision ",
                precision, " needs a multiple of ", block);
}

void validate_precision(const Config& config) {
  const char* name = option_name(config.precision);
  const bool is_bf16 = config.precision == Precision::kBF16;
  if (!is_bf16) {
    DISTMOE_CHECK(config.inference || config.precision == Precision::kMXFP8, kInvalidArgument,
                  "precision ", name,
                  " is inference-only and inference is false; training takes bf16 or mxfp8");
    const std::int64_t block = block_format_of(config.precision).block_size;
    check_multiple(name, "hidden_dim", config.hidden_dim, block);
    check_multiple(name, "intermediate_dim", config.intermediate_dim, block);
  }
  if (config.activation_policy == ActivationPolicy::kLean) {
    DISTMOE_CHECK(!config.inference, kInvalidArgument,
                  "activation_policy is lean and inference is true; lean is for training contexts, "
                  "inference takes full");
    DISTMOE_CHECK(is_bf16, kInvalidArgument, "activation_policy is lean and precision is ", name,
                  "; lean takes bf16 alone");
  }
}

}  // namespace

void validate(const Config& config) {
  validate_sizes(config);
  validate_slots(config);
  validate_factors(config);
  if (config.num_sms) check_size("num_sms", *config.num_sms, kMaxIndex);
  validate_choices(config);
  validate_precision(config);
  DISTMOE_CHECK(!config.timeout || config.timeout->count() > 0, kInvalidArgument, "timeout is ",
                config.timeout->count(), " ms; it must be more than 0");
}

}  // namespace distmoe
