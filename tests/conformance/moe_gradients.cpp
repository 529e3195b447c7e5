// SPDX-License-Identifier: Apache-2.0
#include "conformance/moe_gradients.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <sstream>

#include "runtime/context_impl.hpp"

namespace distmoe::conformance {
namespace {

float element(const TensorView& view, std::int64_t offset) {
  return view.dtype == DType::kF32 ? static_cast<const float*>(view.data)[offset]
                                   : to_float(static_cast<const BF16*>(view.data)[offset]);
}

/// Elements [0, count) of a contiguous view to out[first...].
void copy_elements(const TensorView& view, std::int64_t first, std::vector<float>& out) {
  for (std::int64_t i = 0; i < view.num_elements(); ++i) {
    out[static_cast<std::size_t>(first + i)] = element(view, i);
  }
}

/// Both halves of rows [L][2 * inner][width] in the order of a form.
void copy_halves(const TensorView& view, const CallForm& form, std::int64_t first_expert,
                 std::int64_t inner, std::int64_t width, std::vector<float>& gate,
                 std::vector<float>& up) {
  const bool is_interleaved = form.w13 == W13Form::kInterleaved;
  const std::int64_t num_local = view.num_elements() / (2 * inner * width);
  for (std::int64_t row = 0; row < num_local * 2 * inner; ++row) {
    const std::int64_t expert = first_expert + row / (2 * inner);
    const std::int64_t in_expert = row % (2 * inner);
    const bool is_up = is_interleaved ? in_expert % 2 == 1 : in_expert >= inner;
    const std::int64_t f = is_interleaved ? in_expert / 2 : in_expert % inner;
    for (std::int64_t d = 0; d < width; ++d) {
      (is_up ? up : gate)[static_cast<std::size_t>((expert * inner + f) * width + d)] =
          element(view, row * width + d);
    }
  }
}

struct Named {
  const char* name;
  const std::vector<float>& values;
};

std::vector<Named> named(const GradientValues& g) {
  return {{"grad_x", g.x},
          {"grad_scores", g.scores},
          {"grad of gate", g.gate},
          {"grad of up", g.up},
          {"grad of w2", g.down},
          {"grad of the gate's bias", g.gate_bias},
          {"grad of the up's bias", g.up_bias},
          {"grad of bias2", g.down_bias}};
}

Range experts_of(const MoeProblem& problem, std::size_t ranks, int rank) {
  const std::int64_t each = problem.shape.num_experts / static_cast<std::int64_t>(ranks);
  const std::int64_t more = problem.shape.num_experts % static_cast<std::int64_t>(ranks);
  const std::int64_t begin = rank * each + std::min<std::int64_t>(rank, more);
  return {begin, begin + each + (rank < more ? 1 : 0)};
}

}  // namespace

GradientValues::GradientValues(const MoeProblem& problem) {
  const MoeShape& s = problem.shape;
  const auto size = [](std::int64_t count) { return static_cast<std::size_t>(count); };
  x.resize(size(s.num_tokens * s.hidden_dim));
  scores.resize(size(s.num_tokens * s.top_k));
  gate.resize(size(s.num_experts * s.intermediate_dim * s.hidden_dim));
  up.resize(gate.size());
  down.resize(gate.size());
  gate_bias.resize(size(s.num_experts * s.intermediate_dim));
  up_bias.resize(gate_bias.size());
  down_bias.resize(size(s.num_experts * s.hidden_dim));
}

std::string first_difference(const GradientValues& expected, const GradientValues& actual) {
  const auto mine = named(actual);
  const auto theirs = named(expected);
  for (std::size_t which = 0; which < mine.size(); ++which) {
    for (std::size_t i = 0; i < mine[which].values.size(); ++i) {
      const float a = mine[which].values[i];
      const float e = theirs[which].values[i];
      if (std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(e)) continue;
      std::ostringstream text;
      text << mine[which].name << ", element " << i << ": " << a << " for " << e;
      return text.str();
    }
  }
  return "";
}

std::string first_violation(const MoeProblem& problem, const GradientValues& actual,
                            const GradientOracle& oracle, double tolerance) {
  const auto mine = named(actual);
  const std::vector<const std::vector<double>*> expected{
      &oracle.x,    &oracle.scores,    &oracle.gate,    &oracle.up,
      &oracle.down, &oracle.gate_bias, &oracle.up_bias, &oracle.down_bias};
  std::ostringstream text;
  for (std::size_t which = 0; which < mine.size(); ++which) {
    if ((which == 5 || which == 6) && problem.gate_bias.empty()) continue;
    if (which == 7 && problem.down_bias.empty()) continue;
    const double error = relative_error(mine[which].values, *expected[which]);
    if (!(error <= tolerance)) text << mine[which].name << " is off by " << error << "; ";
  }
  return text.str();
}

std::vector<float> widened(const std::vector<BF16>& rows) {
  std::vector<float> values;
  values.reserve(rows.size());
  for (const BF16 value : rows) values.push_back(to_float(value));
  return values;
}

std::vector<ActivationPolicy> policies_of(const MoeCase& moe_case) {
  if (moe_case.precision != Precision::kBF16) return {ActivationPolicy::kFull};
  return {ActivationPolicy::kFull, ActivationPolicy::kLean};
}

Config training_config(const MoeProblem& problem, const MoeCase& moe_case, const BackwardForm& form,
                       std::int64_t max_tokens) {
  Config config = config_of(problem, moe_case, form.call, max_tokens);
  config.inference = false;
  config.activation_policy = form.policy;
  config.activation_slot_capacity_factor = form.slot_factor;
  return config;
}

RankGradients::RankGradients(const MoeProblem& problem, const std::vector<BF16>& dy,
                             const BackwardForm& form, const TokenCounts& counts, int rank)
    : problem_(problem), form_(form), experts_(experts_of(problem, counts.size(), rank)) {
  const MoeShape& s = problem.shape;
  tokens_.begin = std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
  tokens_.end = tokens_.begin + counts[static_cast<std::size_t>(rank)];
  const std::int64_t t = tokens_.size();
  const std::int64_t l = experts_.size();
  const std::int64_t d = s.hidden_dim;
  const std::int64_t f = s.intermediate_dim;
  using Strides = std::vector<std::int64_t>;
  const auto rows = [&](std::int64_t gap) {
    const std::int64_t step = form.call.row_step;
    return form.call.is_strided ? Strides{(d + gap + step - 1) / step * step, 1} : Strides{};
  };
  const PackedTensor::ValueAt initial =
      form.accumulates ? PackedTensor::ValueAt([&](const auto&) { return form.initial; })
                       : PackedTensor::ValueAt{};
  dy_ = {DType::kBF16, {t, d}, rows(6), [&](const auto& i) {
           return to_float(dy[static_cast<std::size_t>((tokens_.begin + i[0]) * d + i[1])]);
         }};
  x_ = {DType::kBF16, {t, d}, rows(4), {}};
  scores_ = {form.call.score_dtype, {t, s.top_k}, {}, {}};
  if (form.call.w13 == W13Form::kHalves) {
    w13_ = {form.wgrad_dtype, {l, 2, f, d}, {}, initial};
  } else {
    w13_ = {form.wgrad_dtype, {l, 2 * f, d}, {}, initial};
  }
  w2_ = {form.wgrad_dtype, {l, d, f}, {}, initial};
  if (!problem.gate_bias.empty()) bias13_ = {form.wgrad_dtype, {l, 2 * f}, {}, initial};
  if (!problem.down_bias.empty()) bias2_ = {form.wgrad_dtype, {l, d}, {}, initial};
  if (form.is_one_element_off) {
    for (PackedTensor* tensor : {&dy_, &x_, &scores_, &w13_, &w2_, &bias13_, &bias2_}) {
      tensor->move_by_one();
    }
  }
  for (const PackedTensor* tensor : {&x_, &scores_, &w13_, &w2_, &bias13_, &bias2_}) {
    initial_.push_back(tensor->bytes());
  }
}

RoutedGradients RankGradients::destinations() const {
  std::vector<TensorView> views;
  for_each_tensor([&](const PackedTensor& tensor) { views.push_back(tensor.view()); });
  return destinations(views);
}

RoutedGradients RankGradients::destinations(const std::vector<TensorView>& views) const {
  return {.grad_x_TD = views[1],
          .grad_scores_TK = views[2],
          .grad_w13_L2FD = {views[3], form_.accumulates},
          .grad_w2_LDF = {views[4], form_.accumulates},
          .grad_bias13_L2F = {views[5], form_.accumulates},
          .grad_bias2_LD = {views[6], form_.accumulates}};
}

bool RankGradients::is_untouched() const {
  std::size_t which = 0;
  for (const PackedTensor* tensor : {&x_, &scores_, &w13_, &w2_, &bias13_, &bias2_}) {
    if (tensor->bytes() != initial_[which++]) return false;
  }
  return true;
}

bool RankGradients::is_of_a_failed_call(BackendKind backend) const {
  if (backend == BackendKind::kCpu) return is_untouched();
  const auto holds_nan = [](const TensorView& view) {
    const std::int64_t rows = view.num_elements() > 0 ? view.shape[0] : 0;
    const std::int64_t width = rows > 0 ? view.num_elements() / rows : 0;
    bool all = true;
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t i = 0; i < width; ++i) {
        // Poison is NaN too, with the sign set.
        const float value = element(view, row * view.strides[0] + i);
        all = all && std::isnan(value) && !std::signbit(value);
      }
    }
    return all;
  };
  return std::ranges::all_of(std::array{&x_, &scores_, &w13_, &w2_, &bias13_, &bias2_},
                             [&](const PackedTensor* tensor) { return holds_nan(tensor->view()); });
}

void RankGradients::copy_to(GradientValues& all) const {
  for_each_tensor([](const PackedTensor& tensor) {
    EXPECT_TRUE(tensor.is_poison_around())
        << "something was written around " << tensor.view().describe();
  });
  const std::int64_t d = problem_.shape.hidden_dim;
  const std::int64_t f = problem_.shape.intermediate_dim;
  for (std::int64_t token = 0; token < tokens_.size(); ++token) {
    for (std::int64_t i = 0; i < d; ++i) {
      all.x[static_cast<std::size_t>((tokens_.begin + token) * d + i)] =
          element(x_.view(), token * x_.view().strides[0] + i);
    }
  }
  copy_elements(scores_.view(), tokens_.begin * problem_.shape.top_k, all.scores);
  copy_halves(w13_.view(), form_.call, experts_.begin, f, d, all.gate, all.up);
  copy_elements(w2_.view(), experts_.begin * d * f, all.down);
  if (bias13_.view().is_given()) {
    copy_halves(bias13_.view(), form_.call, experts_.begin, f, 1, all.gate_bias, all.up_bias);
  }
  if (bias2_.view().is_given()) copy_elements(bias2_.view(), experts_.begin * d, all.down_bias);
}

namespace {

bool is_on_device(Context& context) { return context.impl().device().type == DeviceType::kCuda; }

/// Freed like the copies of a call.
std::vector<std::unique_ptr<DeviceGradients>>& gradients_of_this_rank() {
  thread_local std::vector<std::unique_ptr<DeviceGradients>> gradients;
  return gradients;
}

}  // namespace

DeviceGradients::DeviceGradients(const RankGradients& host, int device) : host_(host) {
  std::vector<TensorView> views;
  host.for_each_tensor([&](const PackedTensor& tensor) {
    tensors_.push_back(std::make_unique<DeviceTensor>(tensor, device));
    views.push_back(tensors_.back()->view());
  });
  destinations_ = host.destinations(views);
}

void DeviceGradients::bring() const {
  std::size_t next = 0;
  host_.for_each_tensor([&](const PackedTensor& tensor) {
    if (tensors_[next]->buffer().size() > 0) tensors_[next]->upload(tensor);
    ++next;
  });
}

void DeviceGradients::fetch() const {
  std::size_t next = 0;
  host_.for_each_tensor([&](const PackedTensor& tensor) { tensors_[next++]->download(tensor); });
}

SavedForward call_saving(Context& context, const RankCall& call, const CallOptions& options) {
  if (!is_on_device(context)) {
    return saving_routed_experts(context, call.input, call.weights, call.y_view(), options);
  }
  const PlacedCall& placed = place_call(context, call);
  const auto& [input, weights, y] = placed.views;
  SavedForward saved = saving_routed_experts(context, input, weights, y, options);
  try {
    context.check();
  } catch (const Error&) {
    placed.collect();
    throw;
  }
  placed.collect();
  placed.poison_inputs();
  return saved;
}

void call_backward(Context& context, SavedForward&& saved, const RankCall& call,
                   const RankGradients& gradients) {
  if (!is_on_device(context)) {
    routed_experts_backward(context, std::move(saved), gradients.dy(), call.weights,
                            gradients.destinations());
    return;
  }
  const PlacedCall& placed = place_call(context, call);
  std::vector<std::unique_ptr<DeviceGradients>>& all = gradients_of_this_rank();
  if (context.size() == 1) all.clear();
  all.push_back(std::make_unique<DeviceGradients>(gradients, context.impl().device().index));
  const DeviceGradients& copies = *all.back();
  routed_experts_backward(context, std::move(saved), copies.dy(), placed.views.weights,
                          copies.destinations());
  try {
    context.check();
  } catch (const Error&) {
    copies.fetch();
    throw;
  }
  copies.fetch();
}

void call_backward(Context& context, SavedForward&& saved, const RankCall& call) {
  if (!is_on_device(context)) {
    routed_experts_backward(context, std::move(saved), call.input.x_TD, call.weights, {});
    return;
  }
  const PlacedCall& placed = place_call(context, call);
  routed_experts_backward(context, std::move(saved), placed.views.input.x_TD, placed.views.weights,
                          {});
  context.check();
}

GradientValues run_backward(const MoeProblem& problem, const std::vector<BF16>& dy,
                            const MoeCase& moe_case, const TokenCounts& counts,
                            const BackwardForm& form) {
  const Config config =
      training_config(problem, moe_case, form, *std::max_element(counts.begin(), counts.end()));
  GradientValues result(problem);
  std::mutex mutex;
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    const int rank = communicator->rank();
    const RankCall call = pack_rank(problem, form_of(moe_case, form.call, false), counts, rank);
    const RankGradients gradients(problem, dy, form, counts, rank);
    Context context = make_context(config, moe_case, communicator);
    call_backward(context, call_saving(context, call, form.options), call, gradients);
    const std::scoped_lock lock(mutex);
    gradients.copy_to(result);
  });
  return result;
}

GradientValues run_backward(const MoeProblem& problem, const std::vector<BF16>& dy,
                            const MoeCase& moe_case, const BackwardForm& form) {
  return run_backward(problem, dy, moe_case, even_split(problem.shape.num_tokens, moe_case.ranks),
                      form);
}

}  // namespace distmoe::conformance
