// SPDX-License-Identifier: Apache-2.0
//
// Steps 4b and 5: results travel back to the owners of the tokens, which sum them in a fixed order.
#include <algorithm>
#include <array>
#include <cstring>
#include <span>

#include "backend/cpu/cpu_backend.hpp"
#include "backend/cpu/elementwise.hpp"
#include "backend/cpu/staging.hpp"

namespace distmoe::cpu {
namespace {

constexpr std::int64_t kCombineGrain = 16;      // tokens
constexpr std::int64_t kColumnsAtATime = 1024;  // FP32 sums that stay in the first-level cache

using ColumnSums = std::array<float, kColumnsAtATime>;

BF16* output_row(const TensorView& y, std::int64_t token) {
  return static_cast<BF16*>(y.data) + token * y.strides[0];
}

}  // namespace

const BF16* CpuBackend::returned_row(const DenseRows& rows, const BF16* returned,
                                     std::int64_t route) const {
  const std::int64_t row = routing_.row_of_route(route);
  const std::int32_t expert = ids_[static_cast<std::size_t>(setup_.rank)].ids[route];
  return routing_.owner(expert) == setup_.rank ? rows.row(row) : returned + row * rows.width;
}

/// per_route: one row a route. Rows of one expert that come from one source lie together.
void CpuBackend::return_route_rows(const DenseRows& rows) {
  const std::size_t row_bytes = static_cast<std::size_t>(rows.width) * sizeof(BF16);
  const auto send =
      blocks_of(memory_.buffer(buffer_name::kSendStaging), setup_.size, row_bytes,
                [&](int peer) { return peer == setup_.rank ? 0 : routing_.routes_from(peer); });
  const auto receive =
      blocks_of(memory_.buffer(buffer_name::kReceiveStaging), setup_.size, row_bytes,
                [&](int peer) { return peer == setup_.rank ? 0 : routing_.routes_to(peer); });
  pool_.run(setup_.size, [&](std::int64_t peer, int) {
    if (peer == setup_.rank) return;
    std::byte* next = send[static_cast<std::size_t>(peer)].data();
    for (std::int64_t expert = 0; expert < routing_.num_local_experts(); ++expert) {
      const auto source = static_cast<int>(peer);
      const auto count =
          static_cast<std::size_t>(routing_.rows_of(routing_.first_expert() + expert, source));
      if (count == 0) continue;
      std::memcpy(next, rows.row(routing_.first_row_from(expert, source)), count * row_bytes);
      next += count * row_bytes;
    }
  });
  communicator().alltoallv(as_sent(send), receive, setup_.timeout);
}

/// per_rank: one FP32 row a token that has routes here, summed in k order.
void CpuBackend::return_partial_sums() {
  const std::int64_t width = h3_.width;
  const std::size_t row_bytes = static_cast<std::size_t>(width) * sizeof(float);
  const auto send = blocks_of(memory_.buffer(buffer_name::kSendStaging), setup_.size, row_bytes,
                              [&](int peer) { return routing_.tokens_from(peer); });
  const auto receive = blocks_of(memory_.buffer(buffer_name::kReceiveStaging), setup_.size,
                                 row_bytes, [&](int peer) { return routing_.tokens_to(peer); });
  const float* score = memory_.buffer_of<float>(buffer_name::kScoreReceive).data();
  for (int source = 0; source < setup_.size; ++source) {
    if (source == setup_.rank) continue;
    auto* sums = reinterpret_cast<float*>(send[static_cast<std::size_t>(source)].data()) - width;
    std::int64_t last_token = -1;
    routing_.for_each_local_route(source, ids_[static_cast<std::size_t>(source)],
                                  [&](std::int64_t token, std::int64_t, std::int64_t row) {
                                    if (token != last_token) {
                                      sums += width;
                                      std::fill_n(sums, width, 0.0f);
                                    }
                                    last_token = token;
                                    add_scaled(h3_.row(row), *score++, sums, width);
                                  });
  }
  communicator().alltoallv(as_sent(send), receive, setup_.timeout);
}

void CpuBackend::combine(const ForwardCall& call) {
  if (setup_.config.combine == Combine::kPerRoute) {
    sum_routes(call);
  } else {
    sum_ranks(call);
  }
  if (call.clip_counts_3.is_given()) write_clip_counts(call);
}

void CpuBackend::write_clip_counts(const ForwardCall& call) const {
  const std::array<std::int64_t, 3> counts{gates_clipped_, ups_clipped_,
                                           routing_.num_rows() * setup_.config.intermediate_dim};
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (call.clip_counts_3.dtype == DType::kI64) {
      static_cast<std::int64_t*>(call.clip_counts_3.data)[i] = counts[i];
    } else {
      static_cast<float*>(call.clip_counts_3.data)[i] = static_cast<float>(counts[i]);
    }
  }
}

/// Of a token's routes, in the order of k.
class CpuBackend::RouteSums {
 public:
  /// What a norm multiplies rows by, of all columns; empty without a gamma.
  static std::vector<float> gain_of(const std::optional<NormCall>& norm, std::int64_t hidden_dim) {
    std::vector<float> gain;
    if (!norm || norm->gamma_D == nullptr) return gain;
    gain.reserve(static_cast<std::size_t>(hidden_dim));
    for (std::int64_t i = 0; i < hidden_dim; ++i) {
      gain.push_back(to_float(to_bf16(to_float(norm->gamma_D[i]) + norm->gain_center)));
    }
    return gain;
  }

  RouteSums(const ForwardCall& call, std::span<const float> gain)
      : norm_(call.norm),
        gain_(gain),
        rstd_(static_cast<std::size_t>(call.topk_scores_TK.shape[1])) {}
  /// What a route's whole row is multiplied by besides its score.
  void note_row(std::int64_t k, const BF16* h3, std::int64_t width) {
    if (norm_) rstd_[static_cast<std::size_t>(k)] = inverse_rms(h3, width, norm_->eps);
  }
  void begin(std::int64_t column, std::int64_t count) {
    column_ = column;
    count_ = count;
    std::fill_n(sums_.data(), count, 0.0f);
    std::fill_n(lost_.data(), count, 0.0f);
  }
  /// `h3` from the column on.
  void add(std::int64_t k, const BF16* h3, float score) {
    if (!norm_) return add_scaled(h3, score, sums_.data(), count_);
    const float rstd = rstd_[static_cast<std::size_t>(k)];
    if (!gain_.empty()) {
      add_normed(h3, gain_.data() + column_, score, rstd, sums_.data(), count_);
    } else if (norm_->uses_kahan) {
      add_normed_kahan(h3, score, rstd, sums_.data(), lost_.data(), count_);
    } else {
      add_normed(h3, score, rstd, sums_.data(), count_);
    }
  }
  const float* sums() const { return sums_.data(); }

 private:
  const std::optional<NormCall>& norm_;
  std::span<const float> gain_;
  std::vector<float> rstd_;
  ColumnSums sums_{};
  ColumnSums lost_{};  ///< to rounding
  std::int64_t column_ = 0;
  std::int64_t count_ = 0;
};

/// y = bf16(sum_k fp32(h3) * score), k in order, with RMSNorm times rstd.
void CpuBackend::sum_routes(const ForwardCall& call) {
  const std::int64_t top_k = setup_.config.top_k;
  const float* scores = metadata_.scores.data();
  const BF16* returned = received_rows();
  const std::int32_t* ids = ids_[static_cast<std::size_t>(setup_.rank)].ids;
  const std::vector<float> gain = RouteSums::gain_of(call.norm, h3_.width);
  pool_.run_ranges(call.num_tokens, kCombineGrain, [&](std::int64_t begin, std::int64_t end) {
    RouteSums sums(call, gain);
    for (std::int64_t token = begin; token < end; ++token) {
      const std::int64_t first = token * top_k;
      for (std::int64_t k = 0; call.norm && k < top_k; ++k) {
        if (ids[first + k] < 0) continue;
        sums.note_row(k, returned_row(h3_, returned, first + k), h3_.width);
      }
      for (std::int64_t column = 0; column < h3_.width; column += kColumnsAtATime) {
        const std::int64_t count = std::min(kColumnsAtATime, h3_.width - column);
        sums.begin(column, count);
        for (std::int64_t k = 0; k < top_k; ++k) {
          const std::int64_t route = first + k;
          if (ids[route] < 0) continue;
          const BF16* h3 = returned_row(h3_, returned, route) + column;
          sums.add(k, h3, scores[route]);
          if (kept_h3_.data != nullptr) std::copy_n(h3, count, kept_h3_.row(route) + column);
        }
        round_with_bias(sums.sums(), nullptr, output_row(call.y_TD, token) + column, count);
      }
    }
  });
}

/// y = bf16(sum over ranks, ascending, of the rank's FP32 sum over its routes).
void CpuBackend::sum_ranks(const ForwardCall& call) {
  const std::int64_t top_k = setup_.config.top_k;
  const std::int64_t width = h3_.width;
  const float* scores = metadata_.scores.data();
  const auto* returned =
      reinterpret_cast<const float*>(memory_.buffer(buffer_name::kReceiveStaging).data());
  const std::int32_t* ids = ids_[static_cast<std::size_t>(setup_.rank)].ids;
  std::vector<std::int64_t> block_begin(static_cast<std::size_t>(setup_.size));
  for (int peer = 1; peer < setup_.size; ++peer) {
    block_begin[static_cast<std::size_t>(peer)] =
        block_begin[static_cast<std::size_t>(peer - 1)] + routing_.tokens_to(peer - 1);
  }
  // Column ranges are independent; inside one, the tokens that each peer got are met in its order.
  pool_.run_ranges(width, kColumnsAtATime, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t count = end - begin;
    std::vector<std::int64_t> next = block_begin;
    ColumnSums sums;
    ColumnSums own_sums;
    for (std::int64_t token = 0; token < call.num_tokens; ++token) {
      std::fill_n(sums.data(), count, 0.0f);
      for (int peer = 0; peer < setup_.size; ++peer) {
        std::fill_n(own_sums.data(), count, 0.0f);
        bool has_route = false;
        for (std::int64_t route = token * top_k; route < (token + 1) * top_k; ++route) {
          if (ids[route] < 0 || routing_.owner(ids[route]) != peer) continue;
          has_route = true;
          if (peer != setup_.rank) break;
          add_scaled(h3_.row(routing_.row_of_route(route)) + begin, scores[route], own_sums.data(),
                     count);
        }
        if (!has_route) continue;
        const float* partial =
            peer == setup_.rank ? own_sums.data()
                                : returned + next[static_cast<std::size_t>(peer)]++ * width + begin;
        add(partial, sums.data(), count);
      }
      round_with_bias(sums.data(), nullptr, output_row(call.y_TD, token) + begin, count);
    }
  });
}

}  // namespace distmoe::cpu
