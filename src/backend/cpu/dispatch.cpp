// SPDX-License-Identifier: Apache-2.0
//
// Step 3a: the rows of x reach the ranks of their experts. A token crosses to a rank once, however
// many of its experts are there.
#include <algorithm>
#include <cstring>

#include "backend/cpu/cpu_backend.hpp"
#include "backend/cpu/staging.hpp"

namespace distmoe::cpu {
namespace {

constexpr std::int64_t kGatherGrain = 64;

const BF16* row_of(const TensorView& rows, std::int64_t index) {
  return static_cast<const BF16*>(rows.data) + index * rows.strides[0];
}

}  // namespace

/// As BF16, or packed codes: those of a token are made once.
void CpuBackend::exchange_rows(const TensorView& rows_TD, bool is_packed) {
  const Config& config = setup_.config;
  const std::size_t row_bytes =
      is_packed
          ? static_cast<std::size_t>(PackedRowLayout(config.precision, config.hidden_dim).bytes)
          : static_cast<std::size_t>(config.hidden_dim) * sizeof(BF16);
  const auto send = blocks_of(memory_.buffer(buffer_name::kSendStaging), setup_.size, row_bytes,
                              [&](int peer) { return routing_.tokens_to(peer); });
  const auto receive = blocks_of(memory_.buffer(buffer_name::kReceiveStaging), setup_.size,
                                 row_bytes, [&](int peer) { return routing_.tokens_from(peer); });

  std::vector<std::byte*> next(static_cast<std::size_t>(setup_.size));
  std::ranges::transform(send, next.begin(), [](const auto& block) { return block.data(); });
  std::vector<std::int64_t> last_token(static_cast<std::size_t>(setup_.size), -1);
  const RankIds& own = ids_[static_cast<std::size_t>(setup_.rank)];
  for (std::int64_t token = 0; token < own.num_tokens; ++token) {
    const std::byte* row =
        is_packed ? nullptr : reinterpret_cast<const std::byte*>(row_of(rows_TD, token));
    for (std::int64_t k = 0; k < config.top_k; ++k) {
      const std::int32_t expert = own.ids[token * config.top_k + k];
      if (expert < 0) continue;
      const auto peer = static_cast<std::size_t>(routing_.owner(expert));
      if (peer == static_cast<std::size_t>(setup_.rank) || last_token[peer] == token) continue;
      last_token[peer] = token;
      if (row == nullptr) {
        pack_row(config.precision, row_of(rows_TD, token), config.hidden_dim, next[peer]);
        row = next[peer];
      } else {
        std::memcpy(next[peer], row, row_bytes);
      }
      next[peer] += row_bytes;
    }
  }
  communicator().alltoallv(as_sent(send), receive, setup_.timeout);
}

std::vector<std::span<std::byte>> CpuBackend::own_score_blocks() const {
  return blocks_of(memory_.buffer(buffer_name::kScoreSend), setup_.size, sizeof(float),
                   [&](int peer) { return peer == setup_.rank ? 0 : routing_.routes_to(peer); });
}

std::vector<std::span<std::byte>> CpuBackend::peer_score_blocks() const {
  return blocks_of(memory_.buffer(buffer_name::kScoreReceive), setup_.size, sizeof(float),
                   [&](int peer) { return peer == setup_.rank ? 0 : routing_.routes_from(peer); });
}

void CpuBackend::exchange_scores(const ForwardCall& call) {
  const auto send = own_score_blocks();
  std::vector<float*> next;
  next.reserve(send.size());
  for (const auto& block : send) next.push_back(reinterpret_cast<float*>(block.data()));
  const float* scores = metadata_.scores.data();
  const RankIds& own = ids_[static_cast<std::size_t>(setup_.rank)];
  for (std::int64_t route = 0; route < call.num_tokens * setup_.config.top_k; ++route) {
    if (own.ids[route] < 0) continue;
    const auto peer = static_cast<std::size_t>(routing_.owner(own.ids[route]));
    if (peer != static_cast<std::size_t>(setup_.rank)) *next[peer]++ = scores[route];
  }
  communicator().alltoallv(as_sent(send), peer_score_blocks(), setup_.timeout);
}

/// What the gathered rows can be made of again.
void CpuBackend::keep_own_rows(const ForwardCall& call) {
  if (kept_x_.data == nullptr) return;
  const std::size_t row_bytes = static_cast<std::size_t>(kept_x_.width) * sizeof(BF16);
  for (std::int64_t token = 0; token < call.num_tokens; ++token) {
    std::memcpy(kept_x_.row(token), row_of(call.x_TD, token), row_bytes);
  }
}

const BF16* CpuBackend::received_rows() const {
  return reinterpret_cast<const BF16*>(memory_.buffer(buffer_name::kReceiveStaging).data());
}

const BF16* CpuBackend::dispatched_row(const TensorView& own_TD, const BF16* received,
                                       std::int64_t row) const {
  const std::int64_t index = routing_.received_row(row);
  return routing_.row_origin()[static_cast<std::size_t>(row)].source == setup_.rank
             ? row_of(own_TD, index)
             : received + index * setup_.config.hidden_dim;
}

void CpuBackend::gather_rows(const TensorView& rows_TD) {
  if (has_codes()) {
    sends_codes() ? gather_coded_rows(rows_TD) : gather_and_encode_rows(rows_TD);
    return;
  }
  const BF16* received = received_rows();
  const auto row_bytes = static_cast<std::size_t>(x_.width) * sizeof(BF16);
  run_rows(kGatherGrain, [&](const RowRange& rows, int) {
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
      std::memcpy(x_.row(row), dispatched_row(rows_TD, received, row), row_bytes);
    }
  });
}

/// Own rows are quantised here, those of peers arrive as codes.
void CpuBackend::gather_coded_rows(const TensorView& x_TD) {
  const std::int64_t width = setup_.config.hidden_dim;
  const std::int64_t packed_bytes = PackedRowLayout(setup_.config.precision, width).bytes;
  const std::byte* received = memory_.buffer(buffer_name::kReceiveStaging).data();
  run_rows(kGatherGrain, [&](const RowRange& rows, int) {
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
      const std::int64_t index = routing_.received_row(row);
      if (routing_.row_origin()[static_cast<std::size_t>(row)].source == setup_.rank) {
        coded_x_.encode({row_of(x_TD, index), 1, width, width}, row);
      } else {
        coded_x_.unpack(received + index * packed_bytes, row);
      }
    }
  });
}

/// BF16 rows become codes where they are gathered, a band at a time.
void CpuBackend::gather_and_encode_rows(const TensorView& x_TD) {
  static_assert(kGatherGrain <= kCpuRowBlock && kGatherGrain % kMxfp8BlockSize == 0);
  const std::int64_t width = setup_.config.hidden_dim;
  const BF16* received = received_rows();
  run_rows(kGatherGrain, [&](const RowRange& rows, int worker) {
    BF16* band = workspaces_[static_cast<std::size_t>(worker)].decoded_rows;
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
      std::copy_n(dispatched_row(x_TD, received, row), width, band + (row - rows.begin) * width);
    }
    encode_band({band, rows.size(), width, width}, rows, coded_x_, x_columns_);
  });
}

}  // namespace distmoe::cpu
