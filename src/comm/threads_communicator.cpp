// SPDX-License-Identifier: Apache-2.0
//
// The threads engine: ranks are threads of one process. thread_group.hpp has the rendezvous.
#include <exception>
#include <thread>
#include <utility>

#include "comm/thread_group.hpp"
#include "core/check.hpp"
#include "core/current_error.hpp"
#include "distmoe/communicator.hpp"

namespace distmoe {

namespace {

class ThreadsCommunicator final : public Communicator {
 public:
  ThreadsCommunicator(std::shared_ptr<ThreadGroup> group, int rank)
      : group_(std::move(group)), rank_(rank) {}
  ThreadsCommunicator(const ThreadsCommunicator&) = delete;
  ThreadsCommunicator& operator=(const ThreadsCommunicator&) = delete;
  ~ThreadsCommunicator() override { leave(); }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return group_->size(); }
  std::string_view name() const noexcept override { return "threads"; }

  void alltoallv(SendSpans send, RecvSpans recv, Timeout timeout) override {
    only_errors("an exchange of a group of threads",
                [&] { group_->exchange(rank_, send, recv, timeout); });
  }
  void barrier(Timeout timeout) override {
    only_errors("a barrier of a group of threads", [&] { group_->barrier(rank_, timeout); });
  }
  void abort(std::string_view reason) noexcept override { group_->abort(rank_, reason); }

  /// What the destructor does, for a body that returned while copies of the pointer live on.
  void leave() noexcept { group_->leave(rank_); }

 private:
  std::shared_ptr<ThreadGroup> group_;
  int rank_;
};

std::vector<std::shared_ptr<ThreadsCommunicator>> make_communicators(int size) {
  DISTMOE_CHECK(size >= 1, kInvalidArgument, "a group of ", size, " ranks; at least 1 is needed");
  const auto group = std::make_shared<ThreadGroup>(size);
  std::vector<std::shared_ptr<ThreadsCommunicator>> communicators;
  communicators.reserve(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    communicators.push_back(std::make_shared<ThreadsCommunicator>(group, rank));
  }
  return communicators;
}

using Body = std::function<void(std::shared_ptr<Communicator>)>;

/// Runs one rank and tells the peers how it ended.
std::exception_ptr run_rank(const Body& body, ThreadsCommunicator& communicator,
                            std::shared_ptr<Communicator> handle) noexcept {
  try {
    body(std::move(handle));
    communicator.leave();
    return nullptr;
  } catch (const std::exception& error) {
    communicator.abort(error.what());
    return std::current_exception();
  } catch (...) {
    communicator.abort("an exception that is no std::exception");
    return std::current_exception();
  }
}

/// 0 for an exception that started the trouble, more for one that a peer's trouble can explain.
int distance_from_cause(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    return error.code() == ErrorCode::kPeerLost ? 1 : error.code() == ErrorCode::kClosed ? 2 : 0;
  } catch (...) {
    return 0;
  }
}

void rethrow_first_cause(const std::vector<std::exception_ptr>& exceptions) {
  std::exception_ptr cause;
  for (const std::exception_ptr& exception : exceptions) {
    if (!exception) continue;
    if (!cause || distance_from_cause(exception) < distance_from_cause(cause)) cause = exception;
  }
  if (cause) std::rethrow_exception(cause);
}

[[noreturn]] void throw_start_failure(const std::exception_ptr& failure, std::size_t num_started,
                                      std::size_t size) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    throw_error(ErrorCode::kOutOfMemory,
                concat("only ", num_started, " of ", size,
                       " threads of a group could be started: ", error.what()));
  }
}

}  // namespace

std::vector<std::shared_ptr<Communicator>> make_thread_group(int size) {
  return only_errors("making a group of threads", [&] {
    const auto communicators = make_communicators(size);
    return std::vector<std::shared_ptr<Communicator>>(communicators.begin(), communicators.end());
  });
}

void run_thread_group(int size, const Body& body) {
  std::vector<std::shared_ptr<ThreadsCommunicator>> communicators;
  std::vector<std::exception_ptr> exceptions;
  std::vector<std::thread> threads;
  only_errors("making a group of threads", [&] {
    communicators = make_communicators(size);
    exceptions.resize(communicators.size());
    threads.reserve(communicators.size());
  });
  std::exception_ptr start_failure;
  for (std::size_t rank = 0; rank < communicators.size() && !start_failure; ++rank) {
    try {
      threads.emplace_back([&, rank] {
        exceptions[rank] = run_rank(body, *communicators[rank], communicators[rank]);
      });
    } catch (const std::exception&) {
      // NOTE: a std::thread that is destroyed before it is joined ends the process.
      start_failure = std::current_exception();
      communicators[rank]->abort("its thread could not be started");
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (start_failure) throw_start_failure(start_failure, threads.size(), communicators.size());
  rethrow_first_cause(exceptions);
}

}  // namespace distmoe
