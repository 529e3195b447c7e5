// SPDX-License-Identifier: Apache-2.0
//
// Step 1: every rank learns the token counts and expert ids of all ranks.
#include <algorithm>

#include "backend/cpu/cpu_backend.hpp"
#include "comm/agreement.hpp"
#include "core/check.hpp"

namespace distmoe::cpu {
namespace {

/// ids are checked: -1 or [0, E), E fits 32 bits.
template <typename Id>
void narrow_ids(const TensorView& ids, std::int32_t* out) {
  const auto* data = static_cast<const Id*>(ids.data);
  for (std::int64_t token = 0; token < ids.shape[0]; ++token) {
    for (std::int64_t k = 0; k < ids.shape[1]; ++k) {
      *out++ = static_cast<std::int32_t>(data[token * ids.strides[0] + k * ids.strides[1]]);
    }
  }
}

void copy_scores(const TensorView& scores, float* out) {
  for (std::int64_t token = 0; token < scores.shape[0]; ++token) {
    for (std::int64_t k = 0; k < scores.shape[1]; ++k) {
      const std::int64_t offset = token * scores.strides[0] + k * scores.strides[1];
      *out++ = scores.dtype == DType::kF32
                   ? static_cast<const float*>(scores.data)[offset]
                   : to_float(static_cast<const BF16*>(scores.data)[offset]);
    }
  }
}

std::string call_text(const CallHeader& header) {
  return concat(header.kind == CallKind::kSavingForward ? "saving call " : "call ", header.index,
                " of context ", header.context);
}

std::string place_text(const CallHeader& header) {
  return concat("activation slot ", header.slot, ", layer ", header.slot_layer, " of ",
                header.slot_layers);
}

}  // namespace

void CpuBackend::publish(const ForwardCall& call, const std::optional<Error>& refusal) {
  exchange_headers(call, refusal);
  take_metadata(call);
  exchange_ids(call);
  copy_scores(call.topk_scores_TK, metadata_.scores.data());
}

void CpuBackend::take_metadata(const ForwardCall& call) {
  metadata_ = metadata_sets_.forward_only();
  if (call.ticket) {
    metadata_ = metadata_sets_.saved(
        call.ticket->slot * setup_.config.max_moe_layers_per_activation_slot + call.ticket->layer);
  }
  routing_.bind(metadata_.routing);
  for (std::size_t peer = 0; peer < headers_.size(); ++peer) {
    metadata_.tokens[peer] = headers_[peer].num_tokens;
  }
}

void CpuBackend::exchange_headers(const ForwardCall& call, const std::optional<Error>& refusal) {
  CallHeader& mine = headers_[static_cast<std::size_t>(setup_.rank)];
  mine = {.context = setup_.context_number,
          .index = call.index,
          .num_tokens = call.num_tokens,
          .kind = call.saves ? CallKind::kSavingForward : CallKind::kForward,
          .refusal = to_refusal(refusal)};
  if (call.ticket) {
    mine.slot = call.ticket->slot;
    mine.slot_layer = call.ticket->layer;
    mine.slot_layers = call.ticket->slot_layers;
  }
  if (!is_single()) {
    all_gather(communicator(), CallHeader(mine), headers_, setup_.timeout);
  }
  std::vector<Refusal> refusals;
  for (int peer = 0; peer < setup_.size; ++peer) {
    const CallHeader& header = headers_[static_cast<std::size_t>(peer)];
    DISTMOE_CHECK(
        header.context == mine.context && header.index == call.index && header.kind == mine.kind,
        kPeerMismatch, "rank ", peer, " is in ", call_text(header), " while rank ", setup_.rank,
        " is in ", call_text(mine), "; every rank makes the same calls in the same order");
    refusals.push_back(header.refusal);
  }
  throw_if_refused(refusals, setup_.rank, refusal, concat("call ", call.index));
  for (int peer = 0; peer < setup_.size; ++peer) {
    const CallHeader& header = headers_[static_cast<std::size_t>(peer)];
    DISTMOE_CHECK(header.slot == mine.slot && header.slot_layer == mine.slot_layer &&
                      header.slot_layers == mine.slot_layers,
                  kPeerMismatch, "in call ", call.index, " rank ", peer, " saves in ",
                  place_text(header), " while rank ", setup_.rank, " saves in ", place_text(mine),
                  "; every rank selects the same activation slots and depths");
  }
}

void CpuBackend::exchange_ids(const ForwardCall& call) {
  std::span<std::int32_t> next = metadata_.ids;
  const auto size = static_cast<std::size_t>(setup_.size);
  const auto rank = static_cast<std::size_t>(setup_.rank);
  std::vector<std::span<std::byte>> receive(size);
  for (std::size_t peer = 0; peer < size; ++peer) {
    const std::int64_t tokens = metadata_.tokens[peer];
    const auto count = static_cast<std::size_t>(tokens * setup_.config.top_k);
    ids_[peer] = {next.data(), tokens};
    receive[peer] = std::as_writable_bytes(next.first(count));
    next = next.subspan(count);
  }
  auto* own = reinterpret_cast<std::int32_t*>(receive[rank].data());
  if (call.topk_ids_TK.dtype == DType::kI64) {
    narrow_ids<std::int64_t>(call.topk_ids_TK, own);
  } else {
    narrow_ids<std::int32_t>(call.topk_ids_TK, own);
  }
  if (is_single()) return;
  std::vector<std::span<const std::byte>> send(size, receive[rank]);
  send[rank] = {};
  receive[rank] = {};
  communicator().alltoallv(send, receive, setup_.timeout);
}

}  // namespace distmoe::cpu
