// SPDX-License-Identifier: Apache-2.0
#include "rank_group.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>

#include "comm/agreement.hpp"
#include "core/check.hpp"
#include "digest.hpp"

namespace distmoe::tools {
namespace {

// A text of fixed size on the wire.
template <std::size_t Capacity>
class WireText {
 public:
  WireText() = default;
  explicit WireText(std::string_view text)
      : length_(static_cast<std::uint32_t>(std::min(text.size(), Capacity))) {
    std::copy_n(text.begin(), length_, letters_.begin());
  }
  std::string str() const { return {letters_.data(), std::min<std::size_t>(length_, Capacity)}; }

 private:
  std::uint32_t length_ = 0;
  std::array<char, Capacity> letters_{};
};

struct FailureFrame {
  std::int32_t exit_code = 0;
  std::int32_t error = 0;
  WireText<2040> message;
};

struct SettingsFrame {
  Digest digest;
  WireText<500> text;
};

}  // namespace

Failure RankGroup::agree(const Failure& own) {
  const FailureFrame frame{static_cast<std::int32_t>(own.exit_code),
                           static_cast<std::int32_t>(own.error), WireText<2040>(own.message)};
  const std::vector<FailureFrame> frames = all_gather(frame);
  const auto worst = std::max_element(
      frames.begin(), frames.end(),
      [](const FailureFrame& a, const FailureFrame& b) { return a.exit_code < b.exit_code; });
  return {static_cast<ExitCode>(worst->exit_code), static_cast<ErrorCode>(worst->error),
          worst->message.str()};
}

Failure RankGroup::find_difference(const std::string& settings) {
  const SettingsFrame own{digest_of(std::as_bytes(std::span(settings))), WireText<500>(settings)};
  const std::vector<SettingsFrame> frames = all_gather(own);
  for (std::size_t rank = 1; rank < frames.size(); ++rank) {
    if (frames[rank].digest == frames[0].digest) continue;
    return {exit_code_of(ErrorCode::kPeerMismatch), ErrorCode::kPeerMismatch,
            concat("peer_mismatch: the ranks were started differently: rank 0 has ",
                   frames[0].text.str(), ", but rank ", rank, " has ", frames[rank].text.str())};
  }
  return {};
}

void RankGroup::all_gather_bytes(std::span<const std::byte> own, std::span<std::byte> all) {
  distmoe::all_gather_bytes(*communicator_, own, all, timeout_);
}

void RankGroup::send_to_first(int source, std::span<const std::byte> bytes,
                              std::span<std::byte> received) {
  const auto num_ranks = static_cast<std::size_t>(size());
  std::vector<std::span<const std::byte>> send(num_ranks);
  std::vector<std::span<std::byte>> receive(num_ranks);
  if (rank() == source) send[0] = bytes;
  if (is_first()) receive[static_cast<std::size_t>(source)] = received;
  communicator_->alltoallv(send, receive, timeout_);
}

}  // namespace distmoe::tools
