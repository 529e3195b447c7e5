// SPDX-License-Identifier: Apache-2.0
//
// One rank's share of a problem, packed the way a caller would bring it: every layout, type and
// stride that the contract accepts. What lies between the elements is poison.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "conformance/moe_problem.hpp"
#include "distmoe/routed_experts.hpp"

namespace distmoe::conformance {

enum class W13Form { kConcatenated, kInterleaved, kHalves };

struct CallForm {
  DType id_dtype = DType::kI32;
  DType score_dtype = DType::kF32;
  DType bias_dtype = DType::kF32;
  W13Form w13 = W13Form::kConcatenated;
  bool is_strided = false;    ///< gaps between rows, experts and, where legal, elements
  std::int64_t row_step = 1;  ///< elements that strides of x, y and weights are multiples of
  /// The weights are brought prepared for this; its layout is that of w13.
  std::optional<BlockScaledConfig> prepared{};
};

/// A half-open range of tokens or experts.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
};

/// Memory with a view: poisoned, then filled through the view's strides.
class PackedTensor {
 public:
  using ValueAt = std::function<double(const std::array<std::int64_t, kMaxTensorRank>& index)>;

  PackedTensor() = default;
  /// Strides of 0 elements mean row-major. `value_at` empty leaves poison.
  PackedTensor(DType dtype, std::vector<std::int64_t> shape, std::vector<std::int64_t> strides,
               const ValueAt& value_at);

  TensorView view() const { return view_; }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  std::byte* data() const { return static_cast<std::byte*>(view_.data); }
  void poison();
  /// One element further in the same memory, which has room behind.
  void move_by_one();
  /// Whether what lies between and behind the elements is as it was at first.
  bool is_poison_around() const;

 private:
  std::vector<std::byte> bytes_;
  TensorView view_;
};

/// The arguments of one rank's call and the memory behind them.
struct RankCall {
  PackedTensor x, ids, scores, w13, w2, bias13, bias2, y;
  PreparedWeight prepared_w13, prepared_w2;
  RoutedInput input;
  ExpertWeights weights;

  RankCall(const MoeProblem& problem, const CallForm& form, Range tokens, Range experts);
  // A copy's views would borrow the memory of the original; a move takes it along.
  RankCall(const RankCall&) = delete;
  RankCall& operator=(const RankCall&) = delete;
  RankCall(RankCall&&) = default;
  RankCall& operator=(RankCall&&) = default;
  TensorView y_view() const { return y.view(); }
  /// y without gaps; fails the test where a byte between the rows changed.
  std::vector<BF16> y_rows() const;
  bool is_y_untouched() const;
  /// What a call that failed leaves: nothing on the CPU, NaN in every row on a device.
  bool is_y_of_a_failed_call(BackendKind backend) const;
};

}  // namespace distmoe::conformance
