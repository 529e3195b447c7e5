// SPDX-License-Identifier: Apache-2.0
//
// The names of a configuration's choices, as users write them.
#pragma once

#include "distmoe/config.hpp"
#include "distmoe/memory_plan.hpp"

namespace distmoe {

constexpr const char* option_name(Precision precision) {
  switch (precision) {
    case Precision::kBF16: return "bf16";
    case Precision::kMXFP8: return "mxfp8";
    case Precision::kNVFP4: return "nvfp4";
    case Precision::kMXFP4: return "mxfp4";
  }
  return "unknown";
}

constexpr const char* option_name(Pipeline pipeline) {
  return pipeline == Pipeline::kStaged ? "staged" : "mega";
}

constexpr const char* option_name(ActivationPolicy policy) {
  return policy == ActivationPolicy::kFull ? "full" : "lean";
}

constexpr const char* option_name(Combine combine) {
  return combine == Combine::kPerRoute ? "per_route" : "per_rank";
}

constexpr const char* option_name(Activation activation) {
  return activation == Activation::kSwiGLU ? "swiglu" : "swiglu_clamped";
}

constexpr const char* option_name(WgradDType dtype) {
  switch (dtype) {
    case WgradDType::kSameAsWeight: return "none";
    case WgradDType::kBF16: return "bf16";
    case WgradDType::kF32: return "fp32";
  }
  return "unknown";
}

constexpr const char* option_name(GateUpLayout layout) {
  return layout == GateUpLayout::kConcatenated ? "concatenated" : "interleaved";
}

constexpr const char* option_name(KernelChoice choice) {
  return choice == KernelChoice::kTuned ? "tuned" : "fixed";
}

constexpr const char* option_name(BackendKind backend) {
  return backend == BackendKind::kCpu ? "cpu" : "cuda";
}

}  // namespace distmoe
