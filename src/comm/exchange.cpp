// SPDX-License-Identifier: Apache-2.0
#include "comm/exchange.hpp"

#include <algorithm>
#include <cstring>

#include "core/check.hpp"

namespace distmoe {

namespace {

template <typename Spans>
void check_entries(const char* name, int rank, int size, Spans spans) {
  DISTMOE_CHECK(spans.size() == static_cast<std::size_t>(size), kInvalidArgument, "rank ", rank,
                ": alltoallv got ", spans.size(), " ", name, " entries for a group of ", size,
                " ranks");
  for (std::size_t peer = 0; peer < spans.size(); ++peer) {
    DISTMOE_CHECK(spans[peer].data() != nullptr || spans[peer].empty(), kInvalidArgument, "rank ",
                  rank, ": the ", name, " entry of rank ", peer, " is null but has ",
                  spans[peer].size(), " bytes");
  }
}

}  // namespace

void check_exchange(int rank, int size, SendSpans send, RecvSpans recv) {
  check_entries("send", rank, size, send);
  check_entries("recv", rank, size, recv);
  const auto own = static_cast<std::size_t>(rank);
  DISTMOE_CHECK(send[own].size() == recv[own].size(), kInvalidArgument, "rank ", rank,
                ": alltoallv sends ", send[own].size(), " bytes to itself but receives ",
                recv[own].size());
}

void copy_own_entry(int rank, SendSpans send, RecvSpans recv) {
  const auto own = static_cast<std::size_t>(rank);
  if (!send[own].empty()) std::memcpy(recv[own].data(), send[own].data(), send[own].size());
}

std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) {
  // NOTE: milliseconds::max() is a natural way to say "no limit"; added to a clock of nanoseconds
  // it would wrap into the past.
  using Milliseconds = std::chrono::milliseconds;
  constexpr Milliseconds kLongest = std::chrono::hours(24 * 365 * 10);
  return std::clamp(timeout, Milliseconds(0), kLongest);
}

std::chrono::steady_clock::time_point deadline_after(std::chrono::milliseconds timeout) {
  return std::chrono::steady_clock::now() + bounded(timeout);
}

std::string name_ranks(std::span<const int> ranks) {
  constexpr std::size_t kMostNamed = 8;
  const std::size_t num_others = ranks.size() > kMostNamed ? ranks.size() - kMostNamed : 0;
  const std::size_t num_named = ranks.size() - num_others;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < num_named; ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  if (num_others > 0) text += " and " + std::to_string(num_others) + " more";
  return text;
}

}  // namespace distmoe
