// SPDX-License-Identifier: Apache-2.0
//
// A product as the matrix library (oneDNN) keeps it: described, its code generated, ready to run
// on operands of one shape. Which products are kept is decided here.
#pragma once

#include <cstdint>
#include <oneapi/dnnl/dnnl.hpp>

namespace distmoe::cpu {

/// out[i * out_stride + j] = sum_k a[i * a_stride + k] * b[j * b_stride + k], i < a_rows,
/// j < b_rows, k < depth; strides in elements, out in FP32. An operand that is by depth has its
/// element at [k * stride + i or j]; one that is packed lies as pack_columns() puts it. With
/// `accumulates` the sum is added to out.
struct ProductShape {
  dnnl::memory::data_type type = dnnl::memory::data_type::undef;  ///< of a and b
  std::int64_t a_rows = 0;
  std::int64_t b_rows = 0;
  std::int64_t depth = 0;
  std::int64_t a_stride = 0;
  std::int64_t b_stride = 0;
  std::int64_t out_stride = 0;
  bool a_is_by_depth = false;
  bool b_is_by_depth = false;
  bool b_is_packed = false;
  bool accumulates = false;
  auto operator<=>(const ProductShape&) const = default;
};

/// One thread's handle of a product: views whose addresses are set for every run.
class LibraryProduct {
 public:
  LibraryProduct() = default;
  explicit LibraryProduct(const ProductShape& shape);

  const ProductShape& shape() const { return shape_; }
  /// Columns in a block of a b that is packed; 0 where the library does not take this product so,
  /// which must not be run then.
  std::int64_t block_columns() const { return block_columns_; }
  /// Computes on the calling thread, with `scratch` of kCpuLibraryScratchBytes or, where the
  /// library wants more, with a temporary one.
  void run(const void* a, const void* b, float* out, void* scratch);

 private:
  bool fits_scratch() const;

  ProductShape shape_;
  std::int64_t block_columns_ = 0;
  dnnl::memory::desc scratch_desc_;
  dnnl::matmul product_;
  dnnl::memory a_;
  dnnl::memory b_;
  dnnl::memory out_;
  dnnl::memory scratch_;
};

/// The calling thread's handle, valid until its next call.
LibraryProduct& product_of(const ProductShape& shape);

}  // namespace distmoe::cpu
