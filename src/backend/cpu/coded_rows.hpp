// SPDX-License-Identifier: Apache-2.0
//
// The rows of a call as the CPU backend keeps them: BF16, or codes with block scales. Products
// take BF16 alone: codes are decoded, exactly, into the workspace of the thread that multiplies
// them, so that a product of codes is the product of what they stand for.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cpu/grad_matmul.hpp"
#include "backend/cpu/matmul.hpp"
#include "distmoe/config.hpp"
#include "formats/bf16.hpp"
#include "formats/mxfp8.hpp"
#include "formats/nvfp4.hpp"
#include "layout/packed_row.hpp"

namespace distmoe::cpu {

/// Rows of BF16 without gaps, in scratch or in a communication buffer.
struct DenseRows {
  BF16* data = nullptr;
  std::int64_t width = 0;
  BF16* row(std::int64_t index) const { return data + index * width; }
};

/// Rows [begin, end) of one expert.
struct RowRange {
  std::int64_t expert = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
};

/// Rows quantised along the row, MXFP8 or NVFP4, in a region of row(rows, width) bytes.
class CodedRows {
 public:
  CodedRows() = default;
  CodedRows(Precision precision, std::byte* region, std::int64_t num_rows, std::int64_t width);

  std::int64_t width() const { return width_; }
  /// Quantises `values` into the rows from `row` on.
  void encode(const BF16Rows& values, std::int64_t row) const;
  /// Takes a row that was packed elsewhere.
  void unpack(const std::byte* packed, std::int64_t row) const;
  void decode(std::int64_t first, std::int64_t count, BF16* out) const;
  /// What sums over the row are multiplied by: fp32(1 / g) in NVFP4, elsewhere 1.
  float result_factor(std::int64_t row) const {
    return nvfp4_.factors == nullptr ? 1.0F : 1.0F / nvfp4_.factors[row];
  }
  bool has_factors() const { return nvfp4_.factors != nullptr; }

  // As they lie, to be looked at.
  const std::uint8_t* codes(std::int64_t row) const;
  const std::uint8_t* scales(std::int64_t row) const;
  std::int64_t code_bytes() const;
  std::int64_t scale_bytes() const;
  float factor(std::int64_t row) const { return nvfp4_.factors[row]; }

 private:
  Mxfp8View mxfp8_at(std::int64_t row) const;
  Nvfp4View nvfp4_at(std::int64_t row) const;

  Precision precision_ = Precision::kMXFP8;
  std::int64_t width_ = 0;
  Mxfp8View mxfp8_;
  Nvfp4Rows nvfp4_;
};

/// Quantises one row of x into its form of the way.
void pack_row(Precision precision, const BF16* row, std::int64_t width, std::byte* packed);

/// Rows quantised across them, MXFP8 in blocks of 32 rows of one expert, in a region of
/// col(rows, width) bytes. Experts begin at multiples of 32 rows.
class CodedColumns {
 public:
  CodedColumns() = default;
  CodedColumns(std::byte* region, std::int64_t num_rows, std::int64_t width);

  bool is_placed() const { return view_.codes != nullptr; }
  /// Quantises `values` into the rows from `row` on, a multiple of 32, and the zeros behind them.
  void encode(const BF16Rows& values, std::int64_t row) const;
  /// Some columns of some rows, from a multiple of 32 on.
  void decode(const RowRange& rows, std::int64_t first_column, std::int64_t num_columns,
              BF16* out) const;

 private:
  Mxfp8View view_;
};

/// The rows of a product, in whichever form.
class RowOperand {
 public:
  RowOperand() = default;
  explicit RowOperand(const DenseRows& dense) : dense_(dense), width_(dense.width) {}
  explicit RowOperand(const CodedRows& coded) : coded_(coded), width_(coded.width()) {}

  std::int64_t width() const { return width_; }
  /// Rows for one product, at most kCpuRowBlock; codes are decoded into the workspace.
  MatrixView rows(std::int64_t first, std::int64_t count, const Workspace& workspace) const;
  /// Turns sums over rows of codes into results: sum * fp32(1 / g_row) * `weight_factor`, in this
  /// order, where there are factors.
  void scale_sums(std::int64_t first, std::int64_t count, float weight_factor, float* sums,
                  std::int64_t num_columns) const;

 private:
  DenseRows dense_;
  CodedRows coded_;
  std::int64_t width_ = 0;
};

/// The rows of an expert as the depth of a WGRAD, in whichever form.
class DepthOperand {
 public:
  DepthOperand() = default;
  explicit DepthOperand(const DenseRows& dense) : dense_(dense) {}
  explicit DepthOperand(const CodedColumns& coded) : coded_(coded) {}

  bool is_coded() const { return coded_.is_placed(); }
  /// Codes are decoded into `buffer`, without gaps.
  RowSlab slab(const RowRange& rows, std::int64_t first_column, std::int64_t num_columns,
               BF16* buffer) const;

 private:
  DenseRows dense_;
  CodedColumns coded_;
};

}  // namespace distmoe::cpu
