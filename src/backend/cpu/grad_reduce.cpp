// SPDX-License-Identifier: Apache-2.0
//
// The last step of a backward: route gradients and the scores' gradients are back with the owners
// of the tokens, and become grad_x and grad_scores.
#include <algorithm>
#include <array>

#include "backend/cpu/cpu_backend.hpp"
#include "backend/cpu/elementwise.hpp"
#include "backend/cpu/staging.hpp"

namespace distmoe::cpu {
namespace {

constexpr std::int64_t kReduceGrain = 16;       // tokens
constexpr std::int64_t kColumnsAtATime = 1024;  // FP32 sums that stay in the first-level cache

void store_score_gradient(const TensorView& out, std::int64_t route, float value) {
  if (out.dtype == DType::kF32) {
    static_cast<float*>(out.data)[route] = value;
  } else {
    static_cast<BF16*>(out.data)[route] = to_bf16(value);
  }
}

}  // namespace

void CpuBackend::reduce_gradients(const BackwardCall& call) {
  // With h3 of its routes in the slot the owner has all that the scores' gradients need.
  const bool owner_has_h3 = kept_h3_.data != nullptr && !rows_have_h3_;
  if (!owner_has_h3 && !is_single()) return_score_gradients();
  if (call.grad_scores_TK.is_given()) write_grad_scores(call, owner_has_h3);
  if (call.grad_x_TD.is_given()) write_grad_x(call);
}

/// The way of the scores, backwards.
void CpuBackend::return_score_gradients() {
  communicator().alltoallv(as_sent(peer_score_blocks()), own_score_blocks(), setup_.timeout);
}

void CpuBackend::write_grad_scores(const BackwardCall& call, bool owner_has_h3) {
  const std::int64_t top_k = setup_.config.top_k;
  const std::int32_t* ids = ids_[static_cast<std::size_t>(setup_.rank)].ids;
  const std::span<const float> returned = memory_.buffer_of<float>(buffer_name::kScoreSend);
  const auto gradient_of = [&](std::int64_t token, std::int64_t route) {
    if (ids[route] < 0) return 0.0f;
    if (owner_has_h3) {
      const BF16* dy = static_cast<const BF16*>(call.dy_TD.data) + token * call.dy_TD.strides[0];
      return dot(kept_h3_.row(route), dy, kept_h3_.width);
    }
    return routing_.owner(ids[route]) == setup_.rank
               ? metadata_.scores[static_cast<std::size_t>(route)]
               : returned[static_cast<std::size_t>(routing_.row_of_route(route))];
  };
  pool_.run_ranges(call.num_tokens, kReduceGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t token = begin; token < end; ++token) {
      for (std::int64_t route = token * top_k; route < (token + 1) * top_k; ++route) {
        store_score_gradient(call.grad_scores_TK, route, gradient_of(token, route));
      }
    }
  });
}

/// grad_x = bf16(sum_k fp32(route gradient)), k in order.
void CpuBackend::write_grad_x(const BackwardCall& call) {
  const std::int64_t top_k = setup_.config.top_k;
  const std::int64_t width = route_grad_.width;
  const BF16* returned = received_rows();
  const std::int32_t* ids = ids_[static_cast<std::size_t>(setup_.rank)].ids;
  const TensorView& grad_x = call.grad_x_TD;
  pool_.run_ranges(call.num_tokens, kReduceGrain, [&](std::int64_t begin, std::int64_t end) {
    std::array<float, kColumnsAtATime> sums{};
    for (std::int64_t token = begin; token < end; ++token) {
      BF16* out = static_cast<BF16*>(grad_x.data) + token * grad_x.strides[0];
      for (std::int64_t column = 0; column < width; column += kColumnsAtATime) {
        const std::int64_t count = std::min(kColumnsAtATime, width - column);
        std::fill_n(sums.data(), count, 0.0f);
        for (std::int64_t route = token * top_k; route < (token + 1) * top_k; ++route) {
          if (ids[route] < 0) continue;
          add_scaled(returned_row(route_grad_, returned, route) + column, 1.0f, sums.data(), count);
        }
        round_with_bias(sums.data(), nullptr, out + column, count);
      }
    }
  });
}

}  // namespace distmoe::cpu
