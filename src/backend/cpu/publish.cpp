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

const char* kind_text(CallKind kind) {
  switch (kind) {
    case CallKind::kForward: return "call ";
    case CallKind::kSavingForward: return "saving call ";
    case CallKind::kBackward: return "backward call ";
  }
  return "an unknown call ";
}

std::string call_text(const CallHeader& header) {
  return concat(kind_text(header.kind), header.index, " of context ", header.context);
}

std::string place_text(const CallHeader& header) {
  return concat("activation slot ", header.slot, ", layer ", header.slot_layer, " of ",
                header.slot_layers);
}

std::string norm_text(const CallHeader& header) {
  if (header.norm_eps == 0.0F) return "none";
  return concat("one with eps ", header.norm_eps, header.norm_uses_kahan != 0 ? ", Kahan" : "");
}

}  // namespace

void CpuBackend::publish(const ForwardCall& call, const std::optional<Error>& refusal) {
  exchange_headers({.index = call.index,
                    .num_tokens = call.num_tokens,
                    .norm_eps = call.norm ? call.norm->eps : 0.0F,
                    .norm_uses_kahan = call.norm && call.norm->uses_kahan ? 1 : 0,
                    .kind = call.saves ? CallKind::kSavingForward : CallKind::kForward},
                   call.ticket, refusal);
  take_metadata(call.ticket);
  for (std::size_t peer = 0; peer < headers_.size(); ++peer) {
    metadata_.tokens[peer] = headers_[peer].num_tokens;
  }
  exchange_ids(call);
  copy_scores(call.topk_scores_TK, metadata_.scores.data());
}

/// The forward's routing is made again from the ids that it kept.
void CpuBackend::publish_backward(const BackwardCall& call, const std::optional<Error>& refusal) {
  exchange_headers(
      {.index = call.index, .num_tokens = call.num_tokens, .kind = CallKind::kBackward},
      call.ticket, refusal);
  take_metadata(call.ticket);
  const std::int32_t* next = metadata_.ids.data();
  for (std::size_t peer = 0; peer < ids_.size(); ++peer) {
    ids_[peer] = {next, metadata_.tokens[peer]};
    next += metadata_.tokens[peer] * setup_.config.top_k;
  }
  routing_.count(ids_);
  routing_.order(ids_);
  note_load();
}

void CpuBackend::check_same_call(const CallHeader& header, int peer, const CallHeader& mine,
                                 bool is_same) const {
  DISTMOE_CHECK(is_same, kPeerMismatch, "rank ", peer, " is in ", call_text(header), " while rank ",
                setup_.rank, " is in ", call_text(mine),
                "; every rank makes the same calls in the same order");
}

void CpuBackend::take_metadata(const std::optional<SlotTicket>& ticket) {
  metadata_ = metadata_sets_.forward_only();
  if (ticket) {
    metadata_ = metadata_sets_.saved(
        ticket->slot * setup_.config.max_moe_layers_per_activation_slot + ticket->layer);
  }
  routing_.bind(metadata_.routing);
}

void CpuBackend::exchange_headers(CallHeader mine, const std::optional<SlotTicket>& ticket,
                                  const std::optional<Error>& refusal) {
  mine.context = setup_.context_number;
  mine.refusal = to_refusal(refusal);
  if (ticket) {
    mine.slot = ticket->slot;
    mine.slot_layer = ticket->layer;
    mine.slot_layers = ticket->slot_layers;
  }
  headers_[static_cast<std::size_t>(setup_.rank)] = mine;
  if (!is_single()) {
    all_gather(communicator(), mine, headers_, setup_.timeout);
  }
  std::vector<Refusal> refusals;
  for (int peer = 0; peer < setup_.size; ++peer) {
    const CallHeader& header = headers_[static_cast<std::size_t>(peer)];
    check_same_call(header, peer, mine,
                    header.context == mine.context && header.index == mine.index);
    refusals.push_back(header.refusal);
  }
  // NOTE: before the kinds: a rank that refuses may not know which its peers make.
  throw_if_refused(refusals, setup_.rank, refusal, concat("call ", mine.index));
  for (int peer = 0; peer < setup_.size; ++peer) {
    const CallHeader& header = headers_[static_cast<std::size_t>(peer)];
    check_same_call(header, peer, mine, header.kind == mine.kind);
  }
  const bool is_backward = mine.kind == CallKind::kBackward;
  const char* verb = is_backward ? " runs the backward of " : " saves in ";
  const char* advice = is_backward ? "runs the backward of the same forward"
                                   : "selects the same activation slots and depths";
  for (int peer = 0; peer < setup_.size; ++peer) {
    const CallHeader& header = headers_[static_cast<std::size_t>(peer)];
    DISTMOE_CHECK(header.slot == mine.slot && header.slot_layer == mine.slot_layer &&
                      header.slot_layers == mine.slot_layers,
                  kPeerMismatch, "in call ", mine.index, " rank ", peer, verb, place_text(header),
                  " while rank ", setup_.rank, verb, place_text(mine), "; every rank ", advice);
    DISTMOE_CHECK(
        header.norm_eps == mine.norm_eps && header.norm_uses_kahan == mine.norm_uses_kahan,
        kPeerMismatch, "in call ", mine.index, " rank ", peer, " takes ", norm_text(header),
        " while rank ", setup_.rank, " takes ", norm_text(mine),
        "; every rank takes the same post-expert RMSNorm");
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
