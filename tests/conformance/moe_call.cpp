// SPDX-License-Identifier: Apache-2.0
#include "conformance/moe_call.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>

namespace distmoe::conformance {
namespace {

/// NaN in every floating-point type; as an integer neither an expert nor -1.
std::byte poison_of(DType dtype) {
  const bool is_float = dtype == DType::kBF16 || dtype == DType::kF32;
  return is_float ? std::byte{0xFF} : std::byte{0x7A};
}

void store(std::byte* at, DType dtype, double value) {
  const auto put = [at](auto element) { std::memcpy(at, &element, sizeof(element)); };
  switch (dtype) {
    case DType::kBF16: return put(to_bf16(value));
    case DType::kF32: return put(static_cast<float>(value));
    case DType::kI32: return put(static_cast<std::int32_t>(value));
    case DType::kI64: return put(static_cast<std::int64_t>(value));
    default: FAIL() << "the suite does not pack " << to_string(dtype);
  }
}

std::vector<std::int64_t> row_major(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t dim = shape.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * shape[dim];
  return strides;
}

/// Calls visit(index) for every element, in row-major order.
template <typename Visit>
void for_each_index(const TensorView& view, const Visit& visit) {
  std::array<std::int64_t, kMaxTensorRank> index{};
  for (std::int64_t i = view.num_elements(); i > 0; --i) {
    visit(index);
    for (auto dim = static_cast<std::size_t>(view.rank); dim-- > 0;) {
      if (++index[dim] < view.shape[dim]) break;
      index[dim] = 0;
    }
  }
}

std::int64_t offset_of(const TensorView& view,
                       const std::array<std::int64_t, kMaxTensorRank>& index) {
  std::int64_t offset = 0;
  for (std::size_t dim = 0; dim < static_cast<std::size_t>(view.rank); ++dim) {
    offset += index[dim] * view.strides[dim];
  }
  return offset;
}

/// The value of the canonical W13 at [expert][row of 2F][d] of a form.
double w13_value(const MoeProblem& problem, W13Form form, std::int64_t expert, std::int64_t row,
                 std::int64_t d) {
  const std::int64_t inner = problem.shape.intermediate_dim;
  const bool is_interleaved = form == W13Form::kInterleaved;
  const bool is_up = is_interleaved ? row % 2 == 1 : row >= inner;
  const std::int64_t f = is_interleaved ? row / 2 : row % inner;
  const auto at = static_cast<std::size_t>((expert * inner + f) * problem.shape.hidden_dim + d);
  return to_float(is_up ? problem.up[at] : problem.gate[at]);
}

double bias13_value(const MoeProblem& problem, W13Form form, std::int64_t expert,
                    std::int64_t row) {
  const std::int64_t inner = problem.shape.intermediate_dim;
  const bool is_interleaved = form == W13Form::kInterleaved;
  const bool is_up = is_interleaved ? row % 2 == 1 : row >= inner;
  const std::int64_t f = is_interleaved ? row / 2 : row % inner;
  return (is_up ? problem.up_bias
                : problem.gate_bias)[static_cast<std::size_t>(expert * inner + f)];
}

}  // namespace

PackedTensor::PackedTensor(DType dtype, std::vector<std::int64_t> shape,
                           std::vector<std::int64_t> strides, const ValueAt& value_at) {
  if (strides.empty()) strides = row_major(shape);
  view_.dtype = dtype;
  view_.rank = static_cast<int>(shape.size());
  std::ranges::copy(shape, view_.shape.begin());
  std::ranges::copy(strides, view_.strides.begin());
  if (view_.num_elements() == 0) return;  // reports: A02, A03: the data pointer stays null
  std::int64_t last = 0;
  for (std::size_t dim = 0; dim < shape.size(); ++dim) last += (shape[dim] - 1) * strides[dim];
  constexpr std::int64_t kGuardElements = 8;
  bytes_.resize(static_cast<std::size_t>(last + 1 + kGuardElements) * size_of(dtype));
  poison();
  view_.data = bytes_.data();
  if (!value_at) return;
  for_each_index(view_, [&](const auto& index) {
    store(bytes_.data() + offset_of(view_, index) * static_cast<std::int64_t>(size_of(dtype)),
          dtype, value_at(index));
  });
}

void PackedTensor::poison() { std::ranges::fill(bytes_, poison_of(view_.dtype)); }

void PackedTensor::move_by_one() {
  if (bytes_.empty()) return;
  const auto step = static_cast<std::ptrdiff_t>(size_of(view_.dtype));
  std::copy_backward(bytes_.begin(), bytes_.end() - step, bytes_.end());
  std::fill_n(bytes_.begin(), step, poison_of(view_.dtype));
  view_.data = data() + step;
}

bool PackedTensor::is_poison_around() const {
  const auto is_poison = [&](std::byte b) { return b == poison_of(view_.dtype); };
  const std::ptrdiff_t begin = data() - bytes_.data();
  if (view_.is_contiguous()) {
    const auto end = begin + static_cast<std::ptrdiff_t>(view_.num_bytes());
    return std::all_of(bytes_.begin(), bytes_.begin() + begin, is_poison) &&
           std::all_of(bytes_.begin() + end, bytes_.end(), is_poison);
  }
  std::vector<std::byte> rest = bytes_;
  const auto size = static_cast<std::int64_t>(size_of(view_.dtype));
  for_each_index(view_, [&](const auto& index) {
    std::fill_n(rest.begin() + begin + offset_of(view_, index) * size, size,
                poison_of(view_.dtype));
  });
  return std::ranges::all_of(rest, is_poison);
}

RankCall::RankCall(const MoeProblem& problem, const CallForm& form, Range tokens, Range experts) {
  const MoeShape& s = problem.shape;
  const std::int64_t d = s.hidden_dim;
  const std::int64_t f = s.intermediate_dim;
  const std::int64_t t = tokens.size();
  const std::int64_t l = experts.size();
  using Strides = std::vector<std::int64_t>;
  const auto strides = [&](Strides gaps) { return form.is_strided ? std::move(gaps) : Strides{}; };
  const auto at = [](const auto& values, std::int64_t row, std::int64_t width,
                     std::int64_t column) {
    return values[static_cast<std::size_t>(row * width + column)];
  };
  // Up to the next multiple of the step.
  const auto up = [&](std::int64_t stride) {
    return (stride + form.row_step - 1) / form.row_step * form.row_step;
  };
  x = {DType::kBF16, {t, d}, strides({up(d + 3), 1}), [&](const auto& i) {
         return to_float(at(problem.x, tokens.begin + i[0], d, i[1]));
       }};
  ids = {form.id_dtype, {t, s.top_k}, strides({2 * s.top_k + 3, 2}), [&](const auto& i) {
           return static_cast<double>(at(problem.ids, tokens.begin + i[0], s.top_k, i[1]));
         }};
  scores = {form.score_dtype, {t, s.top_k}, strides({3 * s.top_k + 1, 3}), [&](const auto& i) {
              return at(problem.scores, tokens.begin + i[0], s.top_k, i[1]);
            }};
  if (form.w13 == W13Form::kHalves) {
    const std::int64_t half = up(f * up(d + 5) + 2);
    w13 = {DType::kBF16,
           {l, 2, f, d},
           strides({up(2 * half + 7), half, up(d + 5), 1}),
           [&](const auto& i) {
             return w13_value(problem, form.w13, experts.begin + i[0], i[1] * f + i[2], i[3]);
           }};
  } else {
    w13 = {DType::kBF16,
           {l, 2 * f, d},
           strides({up(2 * f * up(d + 5) + 7), up(d + 5), 1}),
           [&](const auto& i) {
             return w13_value(problem, form.w13, experts.begin + i[0], i[1], i[2]);
           }};
  }
  w2 = {
      DType::kBF16, {l, d, f}, strides({up(d * up(f + 1) + 5), up(f + 1), 1}), [&](const auto& i) {
        return to_float(at(problem.down, (experts.begin + i[0]) * d + i[1], f, i[2]));
      }};
  if (!problem.gate_bias.empty()) {
    bias13 = {form.bias_dtype, {l, 2 * f}, strides({4 * f + 3, 2}), [&](const auto& i) {
                return bias13_value(problem, form.w13, experts.begin + i[0], i[1]);
              }};
  }
  if (!problem.down_bias.empty()) {
    bias2 = {form.bias_dtype, {l, d}, strides({2 * d + 1, 2}), [&](const auto& i) {
               return at(problem.down_bias, experts.begin + i[0], d, i[1]);
             }};
  }
  y = {DType::kBF16, {t, d}, strides({up(d + 2), 1}), {}};
  input = {.x_TD = x.view(), .topk_ids_TK = ids.view(), .topk_scores_TK = scores.view()};
  weights = {.w13_L2FD = w13.view(),
             .w2_LDF = w2.view(),
             .bias13_L2F = bias13.view(),
             .bias2_LD = bias2.view()};
  if (!form.prepared) return;
  BlockScaledConfig config = *form.prepared;
  prepared_w2 = prepare_block_scaled_weight(w2.view(), config);
  if (form.w13 == W13Form::kInterleaved) config.gate_up_layout = GateUpLayout::kInterleaved;
  prepared_w13 = prepare_block_scaled_weight(w13.view(), config);
  weights.w13_L2FD = weights.w2_LDF = {};
  weights.prepared_w13 = prepared_w13.view();
  weights.prepared_w2 = prepared_w2.view();
}

std::vector<BF16> RankCall::y_rows() const {
  EXPECT_TRUE(y.is_poison_around()) << "something was written between or behind the rows of y";
  const TensorView view = y.view();
  std::vector<BF16> rows;
  rows.reserve(static_cast<std::size_t>(view.num_elements()));
  for_each_index(view, [&](const auto& index) {
    rows.push_back(static_cast<const BF16*>(view.data)[offset_of(view, index)]);
  });
  return rows;
}

bool RankCall::is_y_untouched() const {
  return std::ranges::all_of(y.bytes(), [](std::byte b) { return b == poison_of(DType::kBF16); });
}

bool RankCall::is_y_of_a_failed_call(BackendKind backend) const {
  if (backend == BackendKind::kCpu) return is_y_untouched();
  // Poison is NaN too: a row that the call left alone has the poison's bits.
  return std::ranges::all_of(y_rows(), [](BF16 value) { return value.bits == 0x7FFF; });
}

}  // namespace distmoe::conformance
