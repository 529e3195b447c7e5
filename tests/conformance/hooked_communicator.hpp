// SPDX-License-Identifier: Apache-2.0
//
// Lets a test act inside a call.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "distmoe/communicator.hpp"

namespace distmoe::conformance {

/// Runs `hook` once, before the exchange that comes after `skip` more of them.
class HookedCommunicator final : public Communicator {
 public:
  explicit HookedCommunicator(std::shared_ptr<Communicator> inner) : inner_(std::move(inner)) {}
  int rank() const noexcept override { return inner_->rank(); }
  int size() const noexcept override { return inner_->size(); }
  std::string_view name() const noexcept override { return "hooked"; }
  void alltoallv(std::span<const std::span<const std::byte>> send,
                 std::span<const std::span<std::byte>> recv, Timeout timeout) override {
    if (hook && skip-- == 0) std::exchange(hook, nullptr)();
    inner_->alltoallv(send, recv, timeout);
  }
  void barrier(Timeout timeout) override { inner_->barrier(timeout); }
  void abort(std::string_view reason) noexcept override { inner_->abort(reason); }

  std::function<void()> hook;
  int skip = 0;

 private:
  std::shared_ptr<Communicator> inner_;
};

}  // namespace distmoe::conformance
