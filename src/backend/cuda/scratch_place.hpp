// SPDX-License-Identifier: Apache-2.0
//
// Where the scratch of a call lies. It is placed for the call's own rows, which the device alone
// knows, from the end of the activation buffer downwards:
//
//   [ x | scores | h1 | hidden rows | h2 ]
//
// What products read most often comes first, so that it leaves the device's memory last where the
// plan has host scratch: an operand is read once for every 256 columns of a result, and host pages
// are not kept in L2. A backward has no grad_h2 in memory, so that this takes less than the plan's
// formula for every number of rows. Shared by host and device.
#pragma once

#include <cstdint>

#include "formats/host_device.hpp"
#include "plan/layer_bytes.hpp"

namespace distmoe::cuda {

/// Columns of F that one part of a score's gradient has (activation_policy lean).
inline constexpr int kScorePartColumns = 128;

DISTMOE_HOST_DEVICE constexpr std::int64_t num_score_parts(std::int64_t intermediate_dim) {
  return (intermediate_dim + kScorePartColumns - 1) / kScorePartColumns;
}

/// Addresses of rows without gaps; 0 where a call has no such region.
struct ScratchPlace {
  std::uint64_t h2;           ///< BF16 [R, F]
  std::uint64_t hidden_rows;  ///< BF16 [R, D] gathered rows of x, then h3; of a backward grad_h3
  std::uint64_t h1;           ///< BF16 [R, 2F]; grad_h1 takes its place
  std::uint64_t scores;       ///< lean: FP32 [R], then [R, parts] of their gradients
  std::uint64_t x;            ///< BF16 [R, D] of a backward whose slot has none
};

/// What a place depends on, besides rows.
struct ScratchLimits {
  std::int64_t hidden_dim = 0;
  std::int64_t intermediate_dim = 0;
  bool is_inference = false;
  bool is_lean = false;
  std::uint64_t end = 0;  ///< where the activation buffer ends
};

DISTMOE_HOST_DEVICE constexpr ScratchPlace place_scratch(const ScratchLimits& limits,
                                                         std::int64_t rows) {
  std::uint64_t begin = limits.end;
  const auto region = [&](std::int64_t width) {
    return begin -= static_cast<std::uint64_t>(LayerBytes<>::dense(rows, width));
  };
  ScratchPlace place{};
  place.h2 = region(limits.intermediate_dim);
  place.hidden_rows = region(limits.hidden_dim);
  place.h1 = region(2 * limits.intermediate_dim);
  if (limits.is_inference) return place;
  if (limits.is_lean) {
    constexpr std::int64_t kFloatWidth = 2;  // in elements of BF16
    place.scores = region(kFloatWidth * (1 + num_score_parts(limits.intermediate_dim)));
  }
  place.x = region(limits.hidden_dim);
  return place;
}

/// Bytes of all regions.
DISTMOE_HOST_DEVICE constexpr std::int64_t scratch_bytes(const ScratchLimits& limits,
                                                         std::int64_t rows) {
  const ScratchPlace place = place_scratch(limits, rows);
  return static_cast<std::int64_t>(limits.end - (limits.is_inference ? place.h1 : place.x));
}

}  // namespace distmoe::cuda
