// SPDX-License-Identifier: Apache-2.0
//
// The names of a configuration's choices, as users write them.
#pragma once

#include "distmoe/config.hpp"

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

}  // namespace distmoe
