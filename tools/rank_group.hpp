// SPDX-License-Identifier: Apache-2.0
//
// What the ranks of a run tell each other besides the layer itself: whether all are fit to go on,
// facts for the report, and the output tokens.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "distmoe/communicator.hpp"
#include "exit_code.hpp"

namespace distmoe::tools {

/// All members that say so are collective and throw what the communicator throws.
class RankGroup {
 public:
  RankGroup(std::shared_ptr<Communicator> communicator, Communicator::Timeout timeout)
      : communicator_(std::move(communicator)), timeout_(timeout) {}

  int rank() const noexcept { return communicator_->rank(); }
  int size() const noexcept { return communicator_->size(); }
  bool is_first() const noexcept { return rank() == 0; }
  const std::shared_ptr<Communicator>& communicator() const noexcept { return communicator_; }

  /// Collective.
  void barrier() { communicator_->barrier(timeout_); }

  /// Collective. The worst failure of all ranks, the lowest rank's where several are equally bad;
  /// the same on every rank. Long messages are cut.
  Failure agree(const Failure& own);

  /// Collective. peer_mismatch on every rank unless all ranks pass the same text.
  Failure find_difference(const std::string& settings);

  /// Collective. Every rank's value, in rank order.
  template <typename Value>
  std::vector<Value> all_gather(const Value& value) {
    static_assert(std::is_trivially_copyable_v<Value>);
    std::vector<Value> values(static_cast<std::size_t>(size()));
    all_gather_bytes(std::as_bytes(std::span(&value, 1)),
                     std::as_writable_bytes(std::span(values)));
    return values;
  }

  /// Collective. `own` of every rank, equally long everywhere, one rank after another.
  template <typename Value>
  std::vector<Value> all_gather(const std::vector<Value>& own) {
    static_assert(std::is_trivially_copyable_v<Value>);
    std::vector<Value> all(own.size() * static_cast<std::size_t>(size()));
    all_gather_bytes(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(all)));
    return all;
  }

  /// Collective. Of every place of `own`, equally long everywhere, the largest value of a rank.
  template <typename Value>
  std::vector<Value> largest(const std::vector<Value>& own) {
    const std::vector<Value> all = all_gather(own);
    std::vector<Value> largest = own;
    for (std::size_t i = 0; i < all.size(); ++i) {
      Value& value = largest[i % own.size()];
      value = std::max(value, all[i]);
    }
    return largest;
  }

  /// Collective. `own` of every rank, equally long everywhere, in rank order; `all` is size() times
  /// as long.
  void all_gather_bytes(std::span<const std::byte> own, std::span<std::byte> all);

  /// Collective. Rank `source` sends `bytes` to the first rank, which receives them in `received`
  /// (equally long there, empty elsewhere). `source` is not the first rank.
  void send_to_first(int source, std::span<const std::byte> bytes, std::span<std::byte> received);

 private:
  std::shared_ptr<Communicator> communicator_;
  Communicator::Timeout timeout_;
};

}  // namespace distmoe::tools
