// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/nccl_group.hpp"

#include <exception>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "comm/exchange.hpp"
#include "comm/nccl/gpu.hpp"
#include "comm/nccl/together.hpp"
#include "core/check.hpp"
#include "core/log.hpp"

namespace distmoe::nccl {
namespace {

constexpr std::chrono::microseconds kPollPause{200};
/// NCCL's own threads notice an abort at once; a driver call that is under way may take its time.
constexpr std::chrono::milliseconds kAbortPatience{5000};

ErrorCode code_of(Result result) {
  switch (result) {
    case Result::kInProgress:
    case Result::kRemoteError: return ErrorCode::kPeerLost;
    case Result::kSystemError:
    case Result::kInvalidUsage: return ErrorCode::kUnsupported;
    default: return ErrorCode::kDeviceFault;
  }
}

}  // namespace

bool run_bounded(int device, std::function<void()> body, std::chrono::milliseconds limit) {
  auto task = std::make_shared<std::packaged_task<void()>>([device, body = std::move(body)] {
    use_gpu(device);
    body();
  });
  std::future<void> done = task->get_future();
  std::thread([task] { (*task)(); }).detach();
  if (done.wait_for(limit) != std::future_status::ready) return false;
  done.get();
  return true;
}

NcclGroup::NcclGroup(Communicator& host, int device, Communicator::Timeout timeout)
    : timeout_(timeout), device_(device) {
  const Library& nccl = library();
  UniqueId id{};
  do_together(host, timeout, "the NCCL group", [&] {
    use_gpu(device_);
    if (host.rank() != 0) return;
    const Result result = nccl.get_unique_id(&id);
    DISTMOE_CHECK(result == Result::kSuccess, kUnsupported,
                  failure_text("ncclGetUniqueId", result, nullptr));
  });
  std::vector<UniqueId> ids(static_cast<std::size_t>(host.size()));
  all_gather(host, id, std::span(ids), timeout);
  try {
    do_together(host, timeout, "the NCCL group", [&] { begin(ids[0], host.rank(), host.size()); });
  } catch (...) {
    abort();
    throw;
  }
}

NcclGroup::~NcclGroup() { abort(); }

void NcclGroup::begin(const UniqueId& id, int rank, int size) {
  ConfigHead config;
  finish("ncclCommInitRankConfig",
         library().comm_init_rank_config(&comm_, size, id, rank, &config));
}

void NcclGroup::finish(const char* what, Result result) {
  const Library& nccl = library();
  const auto deadline = deadline_after(timeout_);
  // NOTE: ncclCommWindowRegister of 2.28 says success while its work goes on.
  if (result == Result::kSuccess) result = Result::kInProgress;
  while (result == Result::kInProgress && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kPollPause);
    const Result asked = nccl.comm_get_async_error(comm_, &result);
    if (asked != Result::kSuccess) result = asked;
  }
  if (result == Result::kSuccess) return;
  const std::string reason =
      result == Result::kInProgress
          ? concat("NCCL: ", what, " did not end within ", timeout_.count(), " ms")
          : failure_text(what, result, comm_);
  abort();
  throw_error(code_of(result), reason);
}

void NcclGroup::abort() noexcept {
  const Comm comm = std::exchange(comm_, nullptr);
  if (comm == nullptr) return;
  try {
    if (run_bounded(
            device_, [comm] { library().comm_abort(comm); }, kAbortPatience))
      return;
    log(LogLevel::kWarning, "NCCL does not end although it was aborted; it is left alone");
  } catch (const std::exception& error) {
    log(LogLevel::kWarning, error.what());
  }
}

}  // namespace distmoe::nccl
