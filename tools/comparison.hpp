// SPDX-License-Identifier: Apache-2.0
//
// Distance between an output and its reference, in FP64. Sums can be merged, so that every rank
// compares the tokens that it owns.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "distmoe/tensor.hpp"

namespace distmoe::tools {

/// The distance of what cannot be close: JSON has no infinity.
inline constexpr double kInfinitelyFar = std::numeric_limits<double>::max();

struct Comparison {
  double rel_l2 = 0.0;             ///< ||y - ref|| / ||ref||
  double cosine = 1.0;             ///< of y and ref as vectors
  double max_abs = 0.0;            ///< the largest |y - ref|
  std::int64_t num_left_out = 0;   ///< elements that are no finite numbers in y and in ref
  std::int64_t num_one_sided = 0;  ///< those that are none in one of the two
};

class ComparisonSums {
 public:
  /// Adds all elements of `y` (BF16 or F32) and `reference` (F32, F64 or BF16), both contiguous and
  /// of the same shape. Where one of the two is NaN or infinite and the other is not, the result is
  /// infinitely far; where both are not finite, the element is left out, and where all are the
  /// result is infinitely far as well.
  void add(const TensorView& y, const TensorView& reference);
  void merge(const ComparisonSums& other);
  /// The zero vector is at distance 0 from itself and infinitely far from others.
  Comparison result() const;

 private:
  void add_element(double value, double reference);

  double difference_squares_ = 0.0;
  double reference_squares_ = 0.0;
  double value_squares_ = 0.0;
  double products_ = 0.0;
  double max_abs_ = 0.0;
  std::int64_t num_compared_ = 0;
  std::int64_t num_left_out_ = 0;
  std::int64_t num_one_sided_ = 0;
};

// Ranks exchange the sums as bytes.
static_assert(std::is_trivially_copyable_v<ComparisonSums>);

}  // namespace distmoe::tools
