// SPDX-License-Identifier: Apache-2.0
#include "comparison.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/check.hpp"
#include "formats/bf16.hpp"

namespace distmoe::tools {
namespace {

// The file that a view maps promises no alignment.
template <typename Value>
Value load(const void* data, std::int64_t index) {
  Value value{};
  std::memcpy(&value, static_cast<const char*>(data) + index * std::int64_t{sizeof(Value)},
              sizeof(Value));
  return value;
}

double load_element(const TensorView& view, std::int64_t index) {
  switch (view.dtype) {
    case DType::kBF16: return to_float(load<BF16>(view.data, index));
    case DType::kF32: return load<float>(view.data, index);
    case DType::kF64: return load<double>(view.data, index);
    default: break;
  }
  throw_error(ErrorCode::kInvalidArgument, concat("the reference is ", view.describe(),
                                                  "; legal types: bf16, float32, float64"));
}

}  // namespace

void ComparisonSums::add(const TensorView& y, const TensorView& reference) {
  const bool same_shape = y.rank == reference.rank && y.shape == reference.shape;
  DISTMOE_CHECK(same_shape && (y.dtype == DType::kBF16 || y.dtype == DType::kF32), kInvalidArgument,
                "the reference is ", reference.describe(), ", but the output is ", y.describe());
  const std::int64_t count = y.num_elements();
  for (std::int64_t index = 0; index < count; ++index) {
    add_element(load_element(y, index), load_element(reference, index));
  }
}

void ComparisonSums::add_element(double value, double reference) {
  if (!std::isfinite(value) || !std::isfinite(reference)) {
    ++(std::isfinite(value) == std::isfinite(reference) ? num_left_out_ : num_one_sided_);
    return;
  }
  ++num_compared_;
  const double difference = value - reference;
  difference_squares_ += difference * difference;
  reference_squares_ += reference * reference;
  value_squares_ += value * value;
  products_ += value * reference;
  max_abs_ = std::max(max_abs_, std::abs(difference));
}

void ComparisonSums::merge(const ComparisonSums& other) {
  difference_squares_ += other.difference_squares_;
  reference_squares_ += other.reference_squares_;
  value_squares_ += other.value_squares_;
  products_ += other.products_;
  max_abs_ = std::max(max_abs_, other.max_abs_);
  num_compared_ += other.num_compared_;
  num_left_out_ += other.num_left_out_;
  num_one_sided_ += other.num_one_sided_;
}

Comparison ComparisonSums::result() const {
  const auto found = [&](double rel_l2, double cosine, double max_abs) {
    return Comparison{rel_l2, cosine, max_abs, num_left_out_, num_one_sided_};
  };
  if (num_one_sided_ > 0 || (num_compared_ == 0 && num_left_out_ > 0)) {
    return found(kInfinitelyFar, 0.0, kInfinitelyFar);
  }
  if (difference_squares_ == 0.0) return found(0.0, 1.0, 0.0);
  if (reference_squares_ == 0.0) return found(kInfinitelyFar, 0.0, max_abs_);
  const double norms = std::sqrt(value_squares_) * std::sqrt(reference_squares_);
  return found(std::sqrt(difference_squares_ / reference_squares_),
               norms > 0.0 ? products_ / norms : 0.0, max_abs_);
}

}  // namespace distmoe::tools
