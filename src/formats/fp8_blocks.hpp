// SPDX-License-Identifier: Apache-2.0
//
// A matrix of E4M3 codes with one scale per block of 128 x 128, partial at the right and lower
// edge: the FP8 of DeepSeek-V3 checkpoints. An element is code * scale.
#pragma once

#include <cstdint>

#include "formats/bf16.hpp"
#include "formats/e4m3.hpp"

namespace distmoe {

inline constexpr std::int64_t kFp8BlockSize = 128;

/// `codes` and `out` are row-major [rows, cols]; `scales` is row-major [ceil(rows / 128),
/// ceil(cols / 128)]. Each element is the exact product, rounded once to BF16.
void decode_fp8_blocks(const E4M3* codes, const float* scales, std::int64_t rows, std::int64_t cols,
                       BF16* out);

}  // namespace distmoe
