// SPDX-License-Identifier: Apache-2.0
//
// Where the regions of one call lie in the activation buffer [slots | host scratch | device
// scratch]. Scratch is carved by the call's own rows from the end of the buffer downwards, so that
// balanced work stays in device scratch; what a slot saves is carved upwards from its offset.
#pragma once

#include <cstdint>

#include "formats/host_device.hpp"
#include "plan/layer_bytes.hpp"

namespace distmoe {

/// Byte offsets; kNoRegion where the precision and policy have no such region.
struct RegionOffsets {
  std::int64_t quantised_rows = -1;
  std::int64_t x = -1;
  std::int64_t h1 = -1;
  std::int64_t h2 = -1;
  std::int64_t h3 = -1;
  std::int64_t grad_h1 = -1;
  std::int64_t grad_h2 = -1;
  std::int64_t grad_h3 = -1;
  std::int64_t bytes = 0;  // of all regions together
};

inline constexpr std::int64_t kNoRegion = -1;

/// The regions that a saving forward of `tokens` own tokens and `rows` received rows keeps from
/// `begin` on.
DISTMOE_HOST_DEVICE constexpr RegionOffsets saved_layout(const LayerDims& shape,
                                                         std::int64_t tokens, std::int64_t rows,
                                                         std::int64_t begin) {
  const LayerRegions sizes = LayerBytes<>{shape}.saved_regions(tokens, rows);
  const bool has_h2 = is_block_scaled(shape.precision);
  const bool is_lean = shape.activation_policy == ActivationPolicy::kLean;
  RegionOffsets offsets;
  if (shape.inference) return offsets;
  std::int64_t next = begin;
  offsets.x = next, next += sizes.x;
  offsets.h1 = next, next += sizes.h1;
  if (has_h2) offsets.h2 = next, next += sizes.h2;
  if (!is_lean) offsets.h3 = next, next += sizes.h3;
  offsets.bytes = next - begin;
  return offsets;
}

/// The scratch regions of a call with `rows` received rows, the last of them ending at `end`. Takes
/// at most the scratch bytes of the plan for every number of rows up to the plan's.
DISTMOE_HOST_DEVICE constexpr RegionOffsets scratch_layout(const LayerDims& shape,
                                                           std::int64_t rows, std::int64_t end) {
  const LayerBytes<> layer{shape};
  const LayerRegions sizes = layer.scratch_regions(rows);
  const bool block_scaled = is_block_scaled(shape.precision);
  RegionOffsets offsets;
  std::int64_t next = end;
  offsets.x = shape.inference && block_scaled ? kNoRegion : (next -= sizes.x);
  offsets.h1 = (next -= sizes.h1);
  if (block_scaled) offsets.quantised_rows = (next -= sizes.quantised_rows);
  if (shape.inference) {
    if (!block_scaled) offsets.h2 = (next -= sizes.h2);
  } else if (block_scaled) {
    offsets.h2 = (next -= sizes.h2);
    offsets.grad_h3 = (next -= sizes.grad_h3);
    offsets.grad_h2 = (next -= sizes.grad_h2);
    offsets.grad_h1 = (next -= sizes.grad_h1);
  } else {
    offsets.grad_h2 = (next -= sizes.grad_h2);
    // NOTE: h2 and then grad_h3 lie over grad_h1, and past its end where they are longer. The
    // plan's formula gives grad_h3 a region of its own as soon as the pair is longer by a rounding
    // step, so it is no bound for calls of fewer rows than planned (D = F = 1: 160 rows against
    // 192). This placement grows with the rows and never takes more than the formula.
    const std::int64_t h2 = LayerBytes<>::dense(rows, shape.intermediate_dim);
    const std::int64_t pair = h2 + LayerBytes<>::dense(rows, shape.hidden_dim);
    next -= pair > sizes.grad_h1 ? pair : sizes.grad_h1;
    offsets.grad_h1 = offsets.h2 = next;
    offsets.grad_h3 = next + h2;
  }
  offsets.bytes = end - next;
  return offsets;
}

}  // namespace distmoe
