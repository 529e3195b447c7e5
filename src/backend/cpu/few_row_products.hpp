// SPDX-License-Identifier: Apache-2.0
//
// The products of a backward for experts of few rows, in processors that multiply BF16
// (AVX512-BF16). There memory decides: a DGRAD reads the weights, a WGRAD writes as much, and the
// matrix library's packing costs more than its products. These read weights as they lie and keep
// sums in registers. Every sum is one chain of FP32: pairs of depth, one after the other, so that
// no bit depends on how many rows or columns are taken together.
#pragma once

#include <cstdint>

#include "backend/cpu/grad_matmul.hpp"

namespace distmoe::cpu {

/// Rows of an expert in one of these products, at most.
// NOTE: up to 24 rows these win in every product, at 32 the library has caught up in W13's DGRAD
// (docs/performance-cpu.md has both sides of the cut).
inline constexpr std::int64_t kFewRows = 24;

/// Whether this process has them: a matter of its processor and of matmul_kind().
bool has_few_row_products();

/// multiply_dgrad() of at most kFewRows rows.
void multiply_few_rows_dgrad(const MatrixView& rows, const DepthRows& weights, float* tile);

/// WGRAD of at most kFewRows rows: some rows of the weight at a time.
class FewRowsWgrad {
 public:
  /// Rows of the weight that are computed together.
  static constexpr std::int64_t kStripRows = 4;

  /// Packs the operands into `workspace`, which is this object's while it lives.
  FewRowsWgrad(const RowSlab& a, const RowSlab& b, std::int64_t num_rows,
               const Workspace& workspace);

  /// sums[i * width() + n] = sum over rows of a(row, first + i) * b(row, n), i < kStripRows. What
  /// lies past the columns of `a` or `b` is zero.
  void multiply(std::int64_t first, float* sums) const;
  /// The same, rounded to BF16.
  void multiply(std::int64_t first, BF16* rounded) const;

  /// Columns of b, filled up.
  std::int64_t width() const { return b_width_; }

 private:
  const std::uint32_t* a_;  ///< [pairs of rows, a_width_]
  const std::uint32_t* b_;  ///< [pairs of rows, b_width_]
  std::int64_t a_width_;
  std::int64_t b_width_;
  std::int64_t num_pairs_;
};

}  // namespace distmoe::cpu
