// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/stream_claims.hpp"

#include <algorithm>
#include <map>
#include <mutex>

namespace distmoe::cuda {
namespace {

struct Claims {
  std::mutex mutex;
  std::map<const std::byte*, StreamClaim> of_rank;  ///< the last of each
};

Claims& claims() {
  static Claims instance;
  return instance;
}

}  // namespace

bool claim_stream(const StreamClaim& claim, std::span<const std::shared_ptr<std::byte>> peers) {
  Claims& all = claims();
  const std::lock_guard lock(all.mutex);
  const auto is_taken_by = [&](const std::shared_ptr<std::byte>& peer) {
    const auto found = all.of_rank.find(peer.get());
    return found != all.of_rank.end() && found->second.device == claim.device &&
           found->second.stream == claim.stream && found->second.call == claim.call;
  };
  if (std::ranges::any_of(peers, is_taken_by)) return false;
  all.of_rank[claim.windows] = claim;
  return true;
}

void forget_stream(const std::byte* windows) noexcept {
  Claims& all = claims();
  const std::lock_guard lock(all.mutex);
  all.of_rank.erase(windows);
}

}  // namespace distmoe::cuda
