// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/elementwise.hpp"

#include <bit>
#include <cmath>

#include "core/simd.hpp"

namespace distmoe::cpu {
namespace {

/// exp(x) within 2 units in the last place; exact limits: 0 far below, Inf far above, NaN for NaN.
/// x = n ln 2 + r with |r| <= ln 2 / 2, ln 2 split in two (Cody and Waite), exp(r) by its Taylor
/// polynomial of degree 7 (remainder under 2^-27), 2^n applied in two factors so that neither
/// overflows. Branch free, so that loops over it vectorise.
inline float exp_fp32(float x) {
  constexpr float kLog2E = 1.44269504088896341f;
  constexpr float kLn2High = 0.693359375f;
  constexpr float kLn2Low = -2.12194440e-4f;
  constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23
  const float at_most = x > 89.0f ? 89.0f : x;
  const float bounded = at_most < -104.0f ? -104.0f : at_most;
  const float shifted = bounded * kLog2E + kRoundToInteger;
  const float n = shifted - kRoundToInteger;
  const float r = (bounded - n * kLn2High) - n * kLn2Low;
  float poly = 1.0f / 5040.0f;
  poly = poly * r + 1.0f / 720.0f;
  poly = poly * r + 1.0f / 120.0f;
  poly = poly * r + 1.0f / 24.0f;
  poly = poly * r + 1.0f / 6.0f;
  poly = poly * r + 0.5f;
  poly = poly * r + 1.0f;
  poly = poly * r + 1.0f;
  // The integer n lies in the low bits of the sum; where x is NaN they are meaningless, and the
  // bound keeps the scales finite while poly keeps the NaN.
  const std::int32_t integer =
      std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(kRoundToInteger);
  const std::int32_t at_least = integer < -151 ? -151 : integer;
  const std::int32_t exponent = at_least > 129 ? 129 : at_least;
  const std::int32_t half = exponent / 2;
  const float scale_a = std::bit_cast<float>((half + 127) << 23);
  const float scale_b = std::bit_cast<float>((exponent - half + 127) << 23);
  return poly * scale_a * scale_b;
}

inline float sigmoid(float z) { return 1.0f / (1.0f + exp_fp32(-z)); }

inline float widened(float value) { return value; }
inline float widened(BF16 value) { return to_float(value); }

/// sum of term(i), i < n: elementwise over 16 lanes, so that every vector width sums alike.
template <typename Term>
inline __attribute__((always_inline)) float sum_of(const Term& term, std::int64_t n) {
  constexpr std::int64_t kLanes = 16;
  float sums[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += term(i + lane);
  }
  for (std::int64_t lane = 0; i + lane < n; ++lane) sums[lane] += term(i + lane);
  for (std::int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::int64_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
  return sums[0];
}

template <typename A>
inline __attribute__((always_inline)) float dot_of(const A* a, const BF16* b, std::int64_t n) {
  return sum_of([&](std::int64_t i) { return widened(a[i]) * to_float(b[i]); }, n);
}

}  // namespace

DISTMOE_SIMD_CLONES
void round_with_bias(const float* acc, const float* bias, BF16* out, std::int64_t n) {
  if (bias == nullptr) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = to_bf16(acc[i]);
  } else {
    for (std::int64_t i = 0; i < n; ++i) out[i] = to_bf16(acc[i] + bias[i]);
  }
}

DISTMOE_SIMD_CLONES
void swiglu(const BF16* gate, const BF16* up, BF16* h2, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float g = to_float(gate[i]);
    h2[i] = to_bf16(g * sigmoid(g) * to_float(up[i]));
  }
}

DISTMOE_SIMD_CLONES
void swiglu_clamped(const BF16* gate, const BF16* up, BF16* h2, std::int64_t n, float alpha,
                    float limit) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float g = to_float(gate[i]);
    const float u = to_float(up[i]);
    // A NaN fails each comparison and so stays.
    const float g_bounded = g > limit ? limit : g;
    const float u_upper = u > limit ? limit : u;
    const float u_bounded = u_upper < -limit ? -limit : u_upper;
    h2[i] = to_bf16(g_bounded * sigmoid(alpha * g_bounded) * (u_bounded + 1.0f));
  }
}

DISTMOE_SIMD_CLONES
void swiglu_gradient(const BF16* gate, const BF16* up, const BF16* grad_h2, BF16* grad_gate,
                     BF16* grad_up, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float g = to_float(gate[i]);
    const float grad = to_float(grad_h2[i]);
    const float s = sigmoid(g);
    grad_gate[i] = to_bf16(grad * to_float(up[i]) * s * (1.0f + g * (1.0f - s)));
    grad_up[i] = to_bf16(grad * g * s);
  }
}

DISTMOE_SIMD_CLONES
void swiglu_clamped_gradient(const BF16* gate, const BF16* up, const BF16* grad_h2, BF16* grad_gate,
                             BF16* grad_up, std::int64_t n, float alpha, float limit) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float g = to_float(gate[i]);
    const float u = to_float(up[i]);
    const float grad = to_float(grad_h2[i]);
    // A NaN fails each comparison and so stays.
    const float g_bounded = g > limit ? limit : g;
    const float u_upper = u > limit ? limit : u;
    const float u_bounded = u_upper < -limit ? -limit : u_upper;
    const float s = sigmoid(alpha * g_bounded);
    const float inner = grad * (u_bounded + 1.0f) * (s + alpha * g_bounded * s * (1.0f - s));
    grad_gate[i] = to_bf16(g > limit ? 0.0f : inner);
    grad_up[i] = to_bf16(u > limit || u < -limit ? 0.0f : grad * g_bounded * s);
  }
}

DISTMOE_SIMD_CLONES
void scale_twice(float* values, float first, float second, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) values[i] = values[i] * first * second;
}

DISTMOE_SIMD_CLONES
float dot(const BF16* a, const BF16* b, std::int64_t n) { return dot_of(a, b, n); }

DISTMOE_SIMD_CLONES
float dot(const float* a, const BF16* b, std::int64_t n) { return dot_of(a, b, n); }

DISTMOE_SIMD_CLONES
void scale(const BF16* in, float factor, BF16* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = to_bf16(to_float(in[i]) * factor);
}

DISTMOE_SIMD_CLONES
void scale(const float* in, float factor, BF16* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = to_bf16(in[i] * factor);
}

DISTMOE_SIMD_CLONES
float inverse_rms(const BF16* h3, std::int64_t n, float eps) {
  return 1.0f / std::sqrt(dot_of(h3, h3, n) / static_cast<float>(n) + eps);
}

DISTMOE_SIMD_CLONES
void add_normed(const BF16* h3, float score, float rstd, float* acc, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) acc[i] += to_float(h3[i]) * score * rstd;
}

DISTMOE_SIMD_CLONES
void add_normed(const BF16* h3, const float* gain, float score, float rstd, float* acc,
                std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) acc[i] += to_float(h3[i]) * gain[i] * score * rstd;
}

DISTMOE_SIMD_CLONES
void add_normed_kahan(const BF16* h3, float score, float rstd, float* acc, float* compensation,
                      std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float term = to_float(h3[i]) * score * rstd - compensation[i];
    const float sum = acc[i] + term;
    const float excess = (sum - acc[i]) - term;
    // An infinite sum has lost nothing that could be made good: it stays what plain sums make it.
    compensation[i] = sum - sum == 0.0F ? excess : 0.0F;
    acc[i] = sum;
  }
}

DISTMOE_SIMD_CLONES
float dot_normed(const BF16* h3, float rstd, const BF16* dy, std::int64_t n) {
  return sum_of([&](std::int64_t i) { return to_float(dy[i]) * (to_float(h3[i]) * rstd); }, n);
}

DISTMOE_SIMD_CLONES
float dot_normed_scaled(const BF16* h3, float rstd, const BF16* dy, float score, std::int64_t n) {
  return sum_of([&](std::int64_t i) { return to_float(h3[i]) * rstd * (to_float(dy[i]) * score); },
                n);
}

DISTMOE_SIMD_CLONES
void norm_gradient(const BF16* h3, float rstd, const BF16* dy, float score, float mean,
                   BF16* grad_h3, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float xn = to_float(h3[i]) * rstd;
    grad_h3[i] = to_bf16((to_float(dy[i]) * score - xn * mean) * rstd);
  }
}

DISTMOE_SIMD_CLONES
std::int64_t count_above(const BF16* values, float limit, std::int64_t n) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < n; ++i) count += to_float(values[i]) > limit ? 1 : 0;
  return count;
}

DISTMOE_SIMD_CLONES
std::int64_t count_outside(const BF16* values, float limit, std::int64_t n) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < n; ++i) count += std::abs(to_float(values[i])) > limit ? 1 : 0;
  return count;
}

DISTMOE_SIMD_CLONES
void add_rounded(const float* row, BF16* acc, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) acc[i] = to_bf16(to_float(acc[i]) + row[i]);
}

DISTMOE_SIMD_CLONES
void add_scaled(const BF16* row, float score, float* acc, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) acc[i] += to_float(row[i]) * score;
}

DISTMOE_SIMD_CLONES
void add(const float* row, float* acc, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) acc[i] += row[i];
}

DISTMOE_SIMD_CLONES
void widen(const BF16* in, float* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = to_float(in[i]);
}

}  // namespace distmoe::cpu
