// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic between the matrix products, on rows that are contiguous. Every function computes
// in FP32 with one rounding per operation (no FMA), so that vector width never changes a bit.
#pragma once

#include <cstdint>

#include "formats/bf16.hpp"

namespace distmoe::cpu {

/// out[i] = bf16(acc[i] + bias[i]); a null bias adds nothing.
void round_with_bias(const float* acc, const float* bias, BF16* out, std::int64_t n);

/// h2[i] = bf16(g * s(g) * u), s(z) = 1 / (1 + exp(-z)).
void swiglu(const BF16* gate, const BF16* up, BF16* h2, std::int64_t n);

/// h2[i] = bf16(g' * s(alpha * g') * (u' + 1)), g' = min(g, limit), u' = clamp(u, -limit, limit).
/// NaN passes through both bounds.
void swiglu_clamped(const BF16* gate, const BF16* up, BF16* h2, std::int64_t n, float alpha,
                    float limit);

/// acc[i] += fp32(row[i]) * score.
void add_scaled(const BF16* row, float score, float* acc, std::int64_t n);

/// acc[i] += row[i].
void add(const float* row, float* acc, std::int64_t n);

/// out[i] = fp32(in[i]).
void widen(const BF16* in, float* out, std::int64_t n);

}  // namespace distmoe::cpu
