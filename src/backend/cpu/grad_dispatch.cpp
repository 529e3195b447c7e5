// SPDX-License-Identifier: Apache-2.0
//
// What a backward needs before its products: activations that the forward did not keep, and grad_h3
// of every route, formed where the row is gathered. A token's dy crosses to a rank once, like its
// x.
#include <algorithm>

#include "backend/cpu/cpu_backend.hpp"
#include "backend/cpu/elementwise.hpp"
#include "backend/cpu/staging.hpp"

namespace distmoe::cpu {
namespace {

/// The gradient of h3 of a row that was multiplied by rstd and by `score`; grad_h3 may be h3.
/// Returns the gradient of the score.
float pull_back_norm(const BF16* dy, float score, float eps, const BF16* h3, BF16* grad_h3,
                     std::int64_t width) {
  const float rstd = inverse_rms(h3, width, eps);
  const float grad_score = dot_normed(h3, rstd, dy, width);
  const float mean = dot_normed_scaled(h3, rstd, dy, score, width) / static_cast<float>(width);
  norm_gradient(h3, rstd, dy, score, mean, grad_h3, width);
  return grad_score;
}

}  // namespace

void CpuBackend::restore_activations(const BackwardCall& call) {
  if (kept_x_.data != nullptr) {
    const TensorView own{kept_x_.data, DType::kBF16, {call.num_tokens, kept_x_.width}};
    if (!is_single()) exchange_rows(own, false);
    gather_rows(own);
  }
  // Of codes a saved layer keeps those of h2 across its rows, which is all that W2's WGRAD takes.
  const bool needs_h2 = !has_codes() || is_recomputed_ || call.norm.has_value();
  if (is_recomputed_) {
    compute_w13_swiglu(call.experts);
  } else if (needs_h2) {
    activate_rows();
  }
  if (has_codes() && needs_h2)
    encode(h2_, coded_h2_, is_recomputed_ ? h2_columns_ : CodedColumns());
  // What the owners of the tokens keep of a saved layer is enough for their scores' gradients. That
  // of a norm is taken where the row is: of peers' tokens it is computed again.
  rows_have_h3_ = setup_.config.activation_policy == ActivationPolicy::kFull &&
                  (is_recomputed_ || call.norm.has_value());
  if (!rows_have_h3_) return;
  // h3 waits for dy where grad_h3 will be.
  h3_ = grad_h3_;
  list_w2_tasks();
  if (kept_h3_.data != nullptr) {
    std::erase_if(tasks_, [&](const ProductTask& task) { return has_own_rows_alone(task); });
  }
  compute_w2(call.experts);
}

/// An expert's rows are in the order of their ranks.
bool CpuBackend::has_own_rows_alone(const ProductTask& task) const {
  const auto source = [&](std::int64_t row) {
    return routing_.row_origin()[static_cast<std::size_t>(row)].source;
  };
  return source(task.first_row) == setup_.rank &&
         source(task.first_row + task.num_rows - 1) == setup_.rank;
}

/// h3 of a row: kept with the routes of an own token, or waiting where grad_h3 will be.
const BF16* CpuBackend::h3_row(std::int64_t row) const {
  const RowOrigin& origin = routing_.row_origin()[static_cast<std::size_t>(row)];
  if (kept_h3_.data == nullptr || origin.source != setup_.rank) return grad_h3_.row(row);
  return kept_h3_.row(std::int64_t{origin.token} * setup_.config.top_k + std::int64_t{origin.k});
}

/// To every rank the scores of the routes that it computes, in its order of rows.
void CpuBackend::exchange_route_scores() {
  if (is_single()) return;
  const std::int32_t* ids = ids_[static_cast<std::size_t>(setup_.rank)].ids;
  const std::span<float> sent = memory_.buffer_of<float>(buffer_name::kScoreSend);
  const std::int64_t num_routes =
      ids_[static_cast<std::size_t>(setup_.rank)].num_tokens * setup_.config.top_k;
  for (std::int64_t route = 0; route < num_routes; ++route) {
    if (ids[route] < 0 || routing_.owner(ids[route]) == setup_.rank) continue;
    sent[static_cast<std::size_t>(routing_.row_of_route(route))] =
        metadata_.scores[static_cast<std::size_t>(route)];
  }
  communicator().alltoallv(as_sent(own_score_blocks()), peer_score_blocks(), setup_.timeout);
}

void CpuBackend::list_score_blocks() {
  score_begin_.assign(
      static_cast<std::size_t>(routing_.num_local_experts() * std::int64_t{setup_.size}), 0);
  std::int64_t next = 0;
  for (int source = 0; source < setup_.size; ++source) {
    if (source == setup_.rank) continue;
    for (std::int64_t expert = 0; expert < routing_.num_local_experts(); ++expert) {
      score_begin_[static_cast<std::size_t>(expert * setup_.size + source)] =
          next - routing_.first_row_from(expert, source);
      next += routing_.rows_of(routing_.first_expert() + expert, source);
    }
  }
}

/// The score of a row of local expert `expert`, later its gradient: both travel in the same place.
float& CpuBackend::route_score(std::int64_t expert, std::int64_t row) {
  const RowOrigin& origin = routing_.row_origin()[static_cast<std::size_t>(row)];
  if (origin.source == setup_.rank) {
    const std::int64_t route =
        std::int64_t{origin.token} * setup_.config.top_k + std::int64_t{origin.k};
    return metadata_.scores[static_cast<std::size_t>(route)];
  }
  const std::int64_t begin =
      score_begin_[static_cast<std::size_t>(expert * setup_.size + origin.source)];
  return received_scores_[static_cast<std::size_t>(begin + row)];
}

void CpuBackend::dispatch_grad_h3(const BackwardCall& call) {
  if (!is_single()) {
    exchange_rows(call.dy_TD, false);
    exchange_route_scores();
  }
  list_score_blocks();
  received_scores_ = memory_.buffer_of<float>(buffer_name::kScoreReceive);
  list_tasks(1, 1);
  const BF16* received = received_rows();
  pool_.run(static_cast<std::int64_t>(tasks_.size()),
            [&](std::int64_t task, int) { gather_grad_h3_task(call, received, task); });
  if (has_codes()) encode(grad_h3_, coded_grad_h3_, grad_h3_columns_);
}

void CpuBackend::gather_grad_h3_task(const BackwardCall& call, const BF16* received,
                                     std::int64_t task_idx) {
  const ProductTask& task = tasks_[static_cast<std::size_t>(task_idx)];
  const bool is_lean = setup_.config.activation_policy == ActivationPolicy::kLean;
  for (std::int64_t row = task.first_row; row < task.first_row + task.num_rows; ++row) {
    const BF16* dy = dispatched_row(call.dy_TD, received, row);
    BF16* grad_h3 = grad_h3_.row(row);
    if (is_lean) {
      // Unscaled: the product of W2 comes before the score.
      std::copy_n(dy, grad_h3_.width, grad_h3);
      continue;
    }
    float& score = route_score(task.expert, row);
    if (call.norm) {
      score = pull_back_norm(dy, score, call.norm->eps, h3_row(row), grad_h3, grad_h3_.width);
      continue;
    }
    const float factor = score;
    if (rows_have_h3_) score = dot(grad_h3, dy, grad_h3_.width);  // h3 lies there
    scale(dy, factor, grad_h3, grad_h3_.width);
  }
}

}  // namespace distmoe::cpu
