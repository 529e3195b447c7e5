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
///
/// What it kept is discarded where its backward was not to be expected and its slot allows it: see
/// Context::discard(). Otherwise the slot needs a reset.
class HeldForward {
 public:
  /// `stream`: where the forward ran.
  HeldForward(SavedForward saved, std::weak_ptr<SharedContext> owner, void* stream)
      : saved(std::move(saved)), owner_(std::move(owner)), stream_(stream) {}
  HeldForward(const HeldForward&) = delete;
  HeldForward& operator=(const HeldForward&) = delete;
  ~HeldForward();

  SavedForward saved;
  std::atomic<bool> is_expendable{false};

 private:
  std::weak_ptr<SharedContext> owner_;
  void* stream_;
};

/// A saved forward without its backward.
struct DroppedForward {
  SavedForward saved;
  bool is_expendable = false;
  void* stream = nullptr;
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

  /// Of a forward or backward that reaches the library, before its arguments are read.
  void note_begun_call() { ++num_begun_calls_; }
  std::int64_t num_begun_calls() const { return num_begun_calls_; }

  void drop(DroppedForward dropped);

  // --- saved forwards by numbers, which travel as tensors (saved_tensor.hpp) ---

  std::int64_t keep(std::shared_ptr<HeldForward> forward);
  /// Null for a number that nothing has.
  std::shared_ptr<HeldForward> find(std::int64_t number);
  void forget(std::int64_t number);

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
  std::atomic<std::int64_t> num_begun_calls_{0};
  std::mutex mutex_;  // of what follows
  std::vector<DroppedForward> dropped_;
  std::unordered_map<std::int64_t, std::shared_ptr<HeldForward>> kept_;
  std::int64_t last_number_ = 0;
};

}  // namespace distmoe::python
