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

/// The gradients of swiglu: dg = dh2 * u * s(g) * (1 + g * (1 - s(g))), du = dh2 * g * s(g),
/// rounded.
void swiglu_gradient(const BF16* gate, const BF16* up, const BF16* grad_h2, BF16* grad_gate,
                     BF16* grad_up, std::int64_t n);

/// The same of swiglu_clamped, with s = s(alpha * g'): dg = dh2 * (u' + 1) *
/// (s + alpha * g' * s * (1 - s)), zero where g > limit; du = dh2 * g' * s, zero where |u| > limit.
void swiglu_clamped_gradient(const BF16* gate, const BF16* up, const BF16* grad_h2, BF16* grad_gate,
                             BF16* grad_up, std::int64_t n, float alpha, float limit);

/// sum_i a[i] * b[i] in FP32: 16 sums over every 16th element, then halved four times.
float dot(const BF16* a, const BF16* b, std::int64_t n);
float dot(const float* a, const BF16* b, std::int64_t n);

/// out[i] = bf16(fp32(in[i]) * factor); out may be in.
void scale(const BF16* in, float factor, BF16* out, std::int64_t n);
void scale(const float* in, float factor, BF16* out, std::int64_t n);

/// values[i] = values[i] * first * second, in this order.
void scale_twice(float* values, float first, float second, std::int64_t n);

/// 1 / sqrt(mean of h3[i]^2 + eps).
float inverse_rms(const BF16* h3, std::int64_t n, float eps);

/// acc[i] += fp32(h3[i]) * score * rstd.
void add_normed(const BF16* h3, float score, float rstd, float* acc, std::int64_t n);
/// The same with h3 multiplied by gain[i] first.
void add_normed(const BF16* h3, const float* gain, float score, float rstd, float* acc,
                std::int64_t n);
/// The same without a gain, with Kahan's compensation of what earlier additions lost.
void add_normed_kahan(const BF16* h3, float score, float rstd, float* acc, float* compensation,
                      std::int64_t n);

/// sum_i dy[i] * xn[i] with xn = h3 * rstd, in the order of dot().
float dot_normed(const BF16* h3, float rstd, const BF16* dy, std::int64_t n);
/// sum_i xn[i] * wdy[i] with wdy = dy * score.
float dot_normed_scaled(const BF16* h3, float rstd, const BF16* dy, float score, std::int64_t n);
/// grad_h3[i] = bf16((wdy[i] - xn[i] * mean) * rstd); grad_h3 may be h3.
void norm_gradient(const BF16* h3, float rstd, const BF16* dy, float score, float mean,
                   BF16* grad_h3, std::int64_t n);

/// How many values[i] are > limit, and how many are in absolute value; NaN is not.
std::int64_t count_above(const BF16* values, float limit, std::int64_t n);
std::int64_t count_outside(const BF16* values, float limit, std::int64_t n);

/// acc[i] = bf16(fp32(acc[i]) + row[i]).
void add_rounded(const float* row, BF16* acc, std::int64_t n);

/// acc[i] += fp32(row[i]) * score.
void add_scaled(const BF16* row, float score, float* acc, std::int64_t n);

/// acc[i] += row[i].
void add(const float* row, float* acc, std::int64_t n);

/// out[i] = fp32(in[i]).
void widen(const BF16* in, float* out, std::int64_t n);

}  // namespace distmoe::cpu
