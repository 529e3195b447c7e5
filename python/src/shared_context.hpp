// SPDX-License-Identifier: Apache-2.0
//
// A context with what Python's ways of dropping objects need: a saved forward may be dropped by any
// thread, with or without the GIL and while a call runs, but a context is one thread's at a time.
// So what is dropped waits here for the next call. Knows no Python.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "distmoe/context.hpp"
#include "distmoe/saved_forward.hpp"

namespace distmoe::python {

class SharedContext;

/// A saved forward; dropping it unused is left to its context's next call.
class HeldForward {
 public:
  HeldForward(SavedForward saved, std::weak_ptr<SharedContext> owner)
      : saved(std::move(saved)), owner_(std::move(owner)) {}
  HeldForward(const HeldForward&) = delete;
  HeldForward& operator=(const HeldForward&) = delete;
  ~HeldForward();

  SavedForward saved;

 private:
  std::weak_ptr<SharedContext> owner_;
};

class SharedContext {
 public:
  explicit SharedContext(Context context) : context_(std::move(context)) {}

  /// For what neither changes the context nor depends on a call that runs.
  const Context& context() const { return context_; }

  /// Runs `body(Context&)` after letting go of what was dropped. Where a call runs already, the
  /// library refuses the second.
  template <typename Body>
  decltype(auto) run(const Body& body) {
    const InCall in_call(*this);
    return body(context_);
  }

  void drop(SavedForward saved);

 private:
  /// Holds the context for one call, if no other has it.
  class InCall {
   public:
    explicit InCall(SharedContext& shared);
    ~InCall();
    InCall(const InCall&) = delete;
    InCall& operator=(const InCall&) = delete;

   private:
    SharedContext& shared_;
    bool is_first_;
  };

  void destroy_dropped();

  Context context_;
  std::atomic_flag in_call_;
  std::mutex mutex_;  // of what follows
  std::vector<SavedForward> dropped_;
};

}  // namespace distmoe::python
