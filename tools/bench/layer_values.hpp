// SPDX-License-Identifier: Apache-2.0
//
// Every number of a benchmarked layer, so that devices can be filled with them and a plain
// computation can ask for any of them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "bench/bench_shape.hpp"
#include "bench/noise.hpp"

namespace distmoe::tools {

struct LayerValues {
  explicit LayerValues(const BenchShape& shape);

  std::int64_t hidden_dim;
  std::int64_t intermediate_dim;
  Noise x;    ///< tokens one after the other, across sets and ranks
  Noise dy;   ///< of the same tokens
  Noise w13;  ///< [E, 2F, D]: gate rows, then up rows
  Noise w2;   ///< [E, D, F]
};

/// Makes the values of a shape once for all ranks of a process. Any thread may ask.
class SharedLayerValues {
 public:
  std::shared_ptr<const LayerValues> of(const BenchShape& shape);

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<const LayerValues>> made_;
};

/// A token's part of forward and backward in FP64, without any rounding on the way.
struct TokenReference {
  std::vector<double> y;            ///< [D]
  std::vector<double> grad_x;       ///< [D]
  std::vector<double> grad_scores;  ///< [K]; 0 for an id of -1
};

TokenReference reference_gradients(const LayerValues& values, std::int64_t token,
                                   std::span<const std::int32_t> ids,
                                   std::span<const float> scores);

/// y of one token in FP64, without any rounding on the way: the sum over its routes of score *
/// W2(SwiGLU(W13 x)). `token` counts in `values.x`; an id of -1 adds nothing.
std::vector<double> reference_row(const LayerValues& values, std::int64_t token,
                                  std::span<const std::int32_t> ids, std::span<const float> scores);

/// y of one token in an exchange, in FP64: x times the sum of its scores, where the id is not -1.
std::vector<double> exchanged_row(const LayerValues& values, std::int64_t token,
                                  std::span<const std::int32_t> ids, std::span<const float> scores);

}  // namespace distmoe::tools
