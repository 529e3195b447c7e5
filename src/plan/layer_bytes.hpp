// SPDX-License-Identifier: Apache-2.0
//
// Bytes of what one MoE layer keeps and of the scratch of one call: the only place that has these
// formulas. The memory plan evaluates them with checked arithmetic at its largest rows; a running
// call evaluates them, on host or device, with the rows that it has (they fit: sizes up to the
// plan's were checked).
//
//   dense(r,d) = up(2*r*d)                                       BF16
//   row(r,d)   = up(r*ceil(d/p)) + up(r*ceil(d/v) + r*g)         quantised along the row
//   col(r,d)   = up(d*ceil(r/p)) + up(d*ceil(r/v))               quantised along rows of one expert
//   MXFP8 p=1 v=32 g=0; NVFP4 p=2 v=16 g=4; MXFP4 quantises weights alone and is BF16 here
#pragma once

#include <cstdint>

#include "core/checked_math.hpp"
#include "distmoe/config.hpp"
#include "formats/block_format.hpp"
#include "formats/host_device.hpp"
#include "layout/packed_row.hpp"

namespace distmoe {

/// What the sizes of a layer depend on, besides tokens and rows.
struct LayerDims {
  std::int64_t hidden_dim = 0;        // D
  std::int64_t intermediate_dim = 0;  // F
  std::int64_t top_k = 0;             // K
  Precision precision = Precision::kBF16;
  Pipeline pipeline = Pipeline::kStaged;
  ActivationPolicy activation_policy = ActivationPolicy::kFull;
  bool inference = false;
};

inline LayerDims layer_dims(const Config& config) {
  return {config.hidden_dim, config.intermediate_dim,  config.top_k,    config.precision,
          config.pipeline,   config.activation_policy, config.inference};
}

/// Arithmetic of a running call.
struct PlainMath {
  static DISTMOE_HOST_DEVICE constexpr std::int64_t add(std::int64_t a, std::int64_t b) {
    return a + b;
  }
  static DISTMOE_HOST_DEVICE constexpr std::int64_t mul(std::int64_t a, std::int64_t b) {
    return a * b;
  }
};

/// Bytes of each region, a multiple of 128 and in memory order; 0 where the precision and policy
/// have no such region.
struct LayerRegions {
  std::int64_t quantised_rows = 0;  // row-quantised operands, shared by the products of a call
  std::int64_t x = 0;               // gathered rows, or this rank's own x in the lean policy
  std::int64_t h1 = 0;
  std::int64_t h2 = 0;       // overlaid on grad_h1 in BF16 training
  std::int64_t h3 = 0;       // of this rank's own routes
  std::int64_t grad_h1 = 0;  // columns only where block-scaled
  std::int64_t grad_h2 = 0;
  std::int64_t grad_h3 = 0;  // 0 in BF16 where it fits inside grad_h1 behind h2
};

template <typename Math = PlainMath>
struct LayerBytes {
  LayerDims shape;

  static DISTMOE_HOST_DEVICE constexpr std::int64_t up(std::int64_t bytes) {
    return Math::mul(ceil_div(bytes, kRegionAlignment), kRegionAlignment);
  }
  static DISTMOE_HOST_DEVICE constexpr std::int64_t dense(std::int64_t rows, std::int64_t width) {
    return up(Math::mul(Math::mul(2, rows), width));
  }
  DISTMOE_HOST_DEVICE constexpr std::int64_t row(std::int64_t rows, std::int64_t width) const {
    const std::int64_t codes = Math::mul(rows, format().code_bytes(width));
    const std::int64_t scales = Math::mul(rows, format().num_scales(width));
    return Math::add(up(codes), up(Math::add(scales, Math::mul(rows, format().factor_bytes))));
  }
  DISTMOE_HOST_DEVICE constexpr std::int64_t col(std::int64_t rows, std::int64_t width) const {
    return Math::add(up(Math::mul(width, format().code_bytes(rows))),
                     up(Math::mul(width, format().num_scales(rows))));
  }

  /// What a recomputing forward keeps of `tokens` own tokens.
  DISTMOE_HOST_DEVICE constexpr std::int64_t input(std::int64_t tokens) const {
    return dense(tokens, shape.hidden_dim);
  }

  /// What a saving forward keeps of `tokens` own tokens and `rows` received rows.
  DISTMOE_HOST_DEVICE constexpr LayerRegions saved_regions(std::int64_t tokens,
                                                           std::int64_t rows) const {
    LayerRegions regions;
    if (shape.inference) return regions;
    regions.h1 = dense(rows, gate_up_dim());
    if (shape.activation_policy == ActivationPolicy::kLean) {
      regions.x = input(tokens);
      return regions;
    }
    regions.h3 = dense(Math::mul(tokens, shape.top_k), shape.hidden_dim);
    if (is_block_scaled(shape.precision)) {
      regions.x = col(rows, shape.hidden_dim);
      regions.h2 = col(rows, shape.intermediate_dim);
    } else {
      regions.x = dense(rows, shape.hidden_dim);
    }
    return regions;
  }
  DISTMOE_HOST_DEVICE constexpr std::int64_t saved(std::int64_t tokens, std::int64_t rows) const {
    return total(saved_regions(tokens, rows));
  }

  /// Scratch of a call that receives `rows` rows.
  DISTMOE_HOST_DEVICE constexpr LayerRegions scratch_regions(std::int64_t rows) const {
    if (is_block_scaled(shape.precision)) return block_scaled_scratch(rows);
    LayerRegions regions;
    regions.x = dense(rows, shape.hidden_dim);
    regions.h1 = dense(rows, gate_up_dim());
    const std::int64_t h2 = dense(rows, shape.intermediate_dim);
    if (shape.inference) {
      regions.h2 = h2;
      return regions;
    }
    regions.grad_h1 = regions.h1;
    regions.grad_h2 = h2;
    if (Math::add(h2, regions.x) > regions.grad_h1) regions.grad_h3 = regions.x;
    return regions;
  }
  DISTMOE_HOST_DEVICE constexpr std::int64_t scratch(std::int64_t rows) const {
    return total(scratch_regions(rows));
  }

  static DISTMOE_HOST_DEVICE constexpr std::int64_t total(const LayerRegions& r) {
    const std::int64_t forward =
        Math::add(Math::add(r.quantised_rows, r.x), Math::add(r.h1, Math::add(r.h2, r.h3)));
    return Math::add(forward, Math::add(r.grad_h1, Math::add(r.grad_h2, r.grad_h3)));
  }

 private:
  DISTMOE_HOST_DEVICE constexpr std::int64_t gate_up_dim() const {
    return Math::mul(2, shape.intermediate_dim);
  }
  DISTMOE_HOST_DEVICE constexpr BlockFormat format() const {
    return block_format_of(shape.precision);
  }

  static DISTMOE_HOST_DEVICE constexpr std::int64_t larger(std::int64_t a, std::int64_t b) {
    return a > b ? a : b;
  }

  DISTMOE_HOST_DEVICE constexpr LayerRegions block_scaled_scratch(std::int64_t rows) const {
    LayerRegions regions;
    const bool mega = shape.pipeline == Pipeline::kMega;
    const std::int64_t row_x = row(rows, shape.hidden_dim);
    const std::int64_t row_h2 = row(rows, shape.intermediate_dim);
    regions.quantised_rows = mega ? Math::add(row_x, row_h2) : larger(row_x, row_h2);
    regions.h1 = dense(rows, gate_up_dim());
    if (shape.inference) return regions;
    regions.quantised_rows = larger(regions.quantised_rows, row(rows, gate_up_dim()));
    regions.x = col(rows, shape.hidden_dim);
    regions.h2 = col(rows, shape.intermediate_dim);
    regions.grad_h3 = col(rows, shape.hidden_dim);
    regions.grad_h2 = dense(rows, shape.intermediate_dim);
    regions.grad_h1 = col(rows, gate_up_dim());
    return regions;
  }
};

}  // namespace distmoe
