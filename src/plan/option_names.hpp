// SPDX-License-Identifier: Apache-2.0
//
// The names of a configuration's choices, as users write them.
#pragma once

#include <string>
#include <string_view>

#include "core/check.hpp"
#include "distmoe/config.hpp"
#include "distmoe/memory_plan.hpp"
#include "distmoe/slot_assignment.hpp"

namespace distmoe {

/// The name of a value that is none of its enumeration.
inline constexpr const char* kUnknownOption = "unknown";

constexpr const char* option_name(Precision precision) {
  switch (precision) {
    case Precision::kBF16: return "bf16";
    case Precision::kMXFP8: return "mxfp8";
    case Precision::kNVFP4: return "nvfp4";
    case Precision::kMXFP4: return "mxfp4";
  }
  return kUnknownOption;
}

constexpr const char* option_name(Pipeline pipeline) {
  switch (pipeline) {
    case Pipeline::kStaged: return "staged";
    case Pipeline::kMega: return "mega";
  }
  return kUnknownOption;
}

constexpr const char* option_name(ActivationPolicy policy) {
  switch (policy) {
    case ActivationPolicy::kFull: return "full";
    case ActivationPolicy::kLean: return "lean";
  }
  return kUnknownOption;
}

constexpr const char* option_name(Combine combine) {
  switch (combine) {
    case Combine::kPerRoute: return "per_route";
    case Combine::kPerRank: return "per_rank";
  }
  return kUnknownOption;
}

constexpr const char* option_name(Activation activation) {
  switch (activation) {
    case Activation::kSwiGLU: return "swiglu";
    case Activation::kSwiGLUClamped: return "swiglu_clamped";
  }
  return kUnknownOption;
}

constexpr const char* option_name(WgradDType dtype) {
  switch (dtype) {
    case WgradDType::kSameAsWeight: return "none";
    case WgradDType::kBF16: return "bf16";
    case WgradDType::kF32: return "fp32";
  }
  return kUnknownOption;
}

constexpr const char* option_name(GateUpLayout layout) {
  switch (layout) {
    case GateUpLayout::kConcatenated: return "concatenated";
    case GateUpLayout::kInterleaved: return "interleaved";
  }
  return kUnknownOption;
}

constexpr const char* option_name(KernelChoice choice) {
  switch (choice) {
    case KernelChoice::kTuned: return "tuned";
    case KernelChoice::kFixed: return "fixed";
  }
  return kUnknownOption;
}

constexpr const char* option_name(BackendKind backend) {
  switch (backend) {
    case BackendKind::kCpu: return "cpu";
    case BackendKind::kCuda: return "cuda";
  }
  return kUnknownOption;
}

constexpr const char* option_name(SlotGrouping grouping) {
  switch (grouping) {
    case SlotGrouping::kAuto: return "auto";
    case SlotGrouping::kMicrobatch: return "microbatch";
    case SlotGrouping::kStageMicrobatch: return "stage_microbatch";
  }
  return kUnknownOption;
}

template <typename Choice>
constexpr bool is_known(Choice choice) {
  return std::string_view(option_name(choice)) != kUnknownOption;
}

/// All names of a choice, whose values count from 0: "bf16, mxfp8".
template <typename Choice>
std::string legal_options() {
  std::string names;
  for (int value = 0; is_known(static_cast<Choice>(value)); ++value) {
    if (value > 0) names += ", ";
    names += option_name(static_cast<Choice>(value));
  }
  return names;
}

/// Throws invalid_argument for a value that is none of its enumeration (a cast made it).
template <typename Choice>
void check_choice(const char* name, Choice choice) {
  DISTMOE_CHECK(is_known(choice), kInvalidArgument, name, " is ", static_cast<int>(choice),
                "; legal is one of ", legal_options<Choice>());
}

}  // namespace distmoe
