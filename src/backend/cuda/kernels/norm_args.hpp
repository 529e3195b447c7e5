// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace distmoe::cuda {

/// Post-expert RMSNorm of a call.
struct NormArgs {
  std::int32_t is_given = 0;
  float eps = 0.0f;
  const __nv_bfloat16* gamma_D = nullptr;  ///< null: rows are multiplied by rstd alone
  float gain_center = 0.0f;
  std::int32_t uses_kahan = 0;
};

}  // namespace distmoe::cuda
