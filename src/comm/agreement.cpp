// SPDX-License-Identifier: Apache-2.0
#include "comm/agreement.hpp"

#include <algorithm>
#include <cstring>

#include "core/check.hpp"

namespace distmoe {

Refusal to_refusal(const std::optional<Error>& error) {
  Refusal refusal;
  if (!error) return refusal;
  refusal.code = static_cast<std::int32_t>(error->code());
  std::strncpy(refusal.message, error->what(), Refusal::kMaxMessage - 1);
  return refusal;
}

void throw_if_refused(std::span<const Refusal> refusals, int rank,
                      const std::optional<Error>& error, std::string_view what) {
  if (error) throw AgreedError(error->code(), error->what());
  const auto first = std::ranges::find_if(
      refusals, [](const Refusal& refusal) { return refusal.code != Refusal::kNone; });
  if (first == refusals.end()) return;
  throw AgreedError(static_cast<ErrorCode>(first->code),
                    concat("rank ", first - refusals.begin(), " refused ", what, " (this is rank ",
                           rank, "): ", first->message));
}

void all_gather_bytes(Communicator& communicator, std::span<const std::byte> mine,
                      std::span<std::byte> all, Communicator::Timeout timeout) {
  const auto size = static_cast<std::size_t>(communicator.size());
  const auto rank = static_cast<std::size_t>(communicator.rank());
  std::vector<std::span<const std::byte>> send(size, mine);
  std::vector<std::span<std::byte>> receive(size);
  for (std::size_t peer = 0; peer < size; ++peer) {
    receive[peer] = all.subspan(peer * mine.size(), mine.size());
  }
  std::ranges::copy(mine, receive[rank].begin());
  send[rank] = {};
  receive[rank] = {};
  if (size > 1) communicator.alltoallv(send, receive, timeout);
}

}  // namespace distmoe
