// SPDX-License-Identifier: Apache-2.0
//
// One communicator of NCCL's own. It is made non-blocking, so that every wait for it is a loop with
// a deadline; what may block nonetheless runs on a thread that is given up on.
#pragma once

#include <chrono>
#include <functional>

#include "comm/nccl/nccl_library.hpp"
#include "distmoe/communicator.hpp"

namespace distmoe::nccl {

/// Runs `body` on a thread of its own with the device current. False where it has not returned
/// within `limit`; the thread then goes on by itself, with what `body` captured.
bool run_bounded(int device, std::function<void()> body, std::chrono::milliseconds limit);

class NcclGroup {
 public:
  /// Collective over `host`, with the GPU of this rank. Throws on every rank alike.
  NcclGroup(Communicator& host, int device, Communicator::Timeout timeout);
  /// Aborts: waits for no peer.
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  /// Null once aborted.
  Comm handle() const noexcept { return comm_; }
  int device() const noexcept { return device_; }
  /// Waits until what `what` began, with `result`, has ended. Throws where it failed, peer_lost
  /// after the timeout; the group is aborted then.
  void finish(const char* what, Result result);
  /// Ends all that the group waits for; nothing of it can be used any more.
  void abort() noexcept;

 private:
  void begin(const UniqueId& id, int rank, int size);

  Communicator::Timeout timeout_;
  int device_;
  Comm comm_ = nullptr;
};

}  // namespace distmoe::nccl
