// SPDX-License-Identifier: Apache-2.0
//
// SwiGLU and its gradient, between the products of W13 and W2.
#include "backend/cpu/cpu_backend.hpp"
#include "backend/cpu/elementwise.hpp"

namespace distmoe::cpu {
namespace {

constexpr std::int64_t kRowsAtATime = 16;

}  // namespace

/// h2 of some columns of one row of h1.
void CpuBackend::activate(const BF16* gate, const BF16* up, BF16* h2, std::int64_t count) const {
  const Config& config = setup_.config;
  if (config.activation == Activation::kSwiGLU) {
    swiglu(gate, up, h2, count);
  } else {
    swiglu_clamped(gate, up, h2, count, static_cast<float>(config.swiglu_alpha),
                   static_cast<float>(config.swiglu_limit));
  }
}

void CpuBackend::activate_rows() {
  const std::int64_t width = setup_.config.intermediate_dim;
  run_rows(kRowsAtATime, [&](const RowRange& rows, int) {
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
      activate(h1_.row(row), h1_.row(row) + width, h2_.row(row), width);
    }
  });
}

void CpuBackend::swiglu_backward(const BackwardCall&) {
  const Config& config = setup_.config;
  const std::int64_t width = config.intermediate_dim;
  const auto alpha = static_cast<float>(config.swiglu_alpha);
  const auto limit = static_cast<float>(config.swiglu_limit);
  run_rows(kRowsAtATime, [&](const RowRange& rows, int) {
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
      const BF16* gate = h1_.row(row);
      BF16* grad_gate = grad_h1_.row(row);
      if (config.activation == Activation::kSwiGLU) {
        swiglu_gradient(gate, gate + width, grad_h2_.row(row), grad_gate, grad_gate + width, width);
      } else {
        swiglu_clamped_gradient(gate, gate + width, grad_h2_.row(row), grad_gate, grad_gate + width,
                                width, alpha, limit);
      }
    }
  });
  if (has_codes()) encode(grad_h1_, coded_grad_h1_, grad_h1_columns_);
}

}  // namespace distmoe::cpu
