// SPDX-License-Identifier: Apache-2.0
#include "runtime/handshake.hpp"

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

#include "comm/agreement.hpp"
#include "core/check.hpp"
#include "core/current_error.hpp"
#include "core/environment.hpp"
#include "plan/option_names.hpp"
#include "runtime/config_record.hpp"
#include "runtime/context_impl.hpp"
#include "runtime/cores.hpp"

namespace distmoe {
namespace {

constexpr std::chrono::seconds kDefaultCpuTimeout{300};
constexpr std::chrono::seconds kDefaultCudaTimeout{600};
constexpr int kMaxThreads = 1024;

struct CreationRecord {
  ConfigRecord config;
  CoreShare cores;
  std::int64_t context_number = 0;  ///< rank 0's holds for all
  Refusal refusal;
};

/// NOTE: contexts may share a communicator; without a number of their own, ranks that call them in
/// different orders would compute with each other's rows.
std::int64_t next_context_number() {
  static std::atomic<std::int64_t> last{0};
  return ++last;
}

/// What this build cannot do, found before anything is allocated.
void check_supported(const Config& config, const ContextOptions& options) {
  if (options.backend == BackendKind::kCuda) {
    const std::string reason = cuda::why_unavailable();
    DISTMOE_CHECK(reason.empty(), kUnsupported, "CUDA is not available: ", reason);
  }
  DISTMOE_CHECK(config.precision == Precision::kBF16 || options.backend == BackendKind::kCpu,
                kUnsupported,
                "the CUDA backend of this version computes in bf16 only, precision is ",
                option_name(config.precision));
  DISTMOE_CHECK(options.num_threads >= 0 && options.num_threads <= kMaxThreads, kInvalidArgument,
                "num_threads must be 0 (choose) to ", kMaxThreads, ", got ", options.num_threads);
}

template <typename Body>
std::optional<Error> error_of(const Body& body) {
  try {
    body();
  } catch (...) {
    return current_error("creating a context");
  }
  return std::nullopt;
}

/// How long ranks wait for each other while they create a context. An illegal timeout is about to
/// be refused, which takes a legal one.
Communicator::Timeout creation_timeout(const Config& config, bool is_cuda) {
  const Communicator::Timeout usual = is_cuda ? kDefaultCudaTimeout : kDefaultCpuTimeout;
  return config.timeout && config.timeout->count() > 0 ? *config.timeout : usual;
}

std::vector<CreationRecord> exchange(Communicator* communicator, const CreationRecord& mine,
                                     Communicator::Timeout timeout) {
  std::vector<CreationRecord> all(communicator ? static_cast<std::size_t>(communicator->size()) : 1,
                                  mine);
  if (all.size() > 1) all_gather(*communicator, mine, std::span(all), timeout);
  return all;
}

void agree(const std::vector<CreationRecord>& all, int rank, const std::optional<Error>& error) {
  std::vector<Refusal> refusals;
  refusals.reserve(all.size());
  for (const CreationRecord& record : all) refusals.push_back(record.refusal);
  throw_if_refused(refusals, rank, error, "to create a context");
}

void check_same_config(const std::vector<CreationRecord>& all) {
  for (std::size_t peer = 1; peer < all.size(); ++peer) {
    const std::string difference = first_difference(all[0].config, all[peer].config);
    DISTMOE_CHECK(difference.empty(), kPeerMismatch, "ranks 0 and ", peer,
                  " create a context of different configurations: ", difference);
  }
}

int choose_num_threads(const std::vector<CreationRecord>& all, int rank,
                       const ContextOptions& options) {
  if (options.num_threads > 0) return options.num_threads;
  if (environment().num_threads > 0) return environment().num_threads;
  const CoreShare& mine = all[static_cast<std::size_t>(rank)].cores;
  const auto sharing = std::ranges::count_if(all, [&](const CreationRecord& record) {
    return record.cores.fingerprint == mine.fingerprint;
  });
  return std::clamp(mine.num_cores / static_cast<int>(sharing), 1, kMaxThreads);
}

std::unique_ptr<ContextImpl> agree_on_context(const Config& config,
                                              const std::shared_ptr<Communicator>& communicator,
                                              const ContextOptions& options, const Error* reason) {
  const int rank = communicator ? communicator->rank() : 0;
  const int size = communicator ? communicator->size() : 1;
  DISTMOE_CHECK(size >= 1 && rank >= 0 && rank < size, kInvalidArgument,
                "the communicator says rank ", rank, " of ", size, "; legal is 0 to size - 1");
  const bool is_cuda = options.backend == BackendKind::kCuda;
  const Communicator::Timeout timeout = creation_timeout(config, is_cuda);

  CreationRecord mine{.config = record_config(config, options),
                      .cores = cores_of_this_process(),
                      .context_number = next_context_number(),
                      .refusal = {}};
  const std::optional<Error> refusal = error_of([&] {
    if (reason != nullptr) throw Error(*reason);
    plan_memory(config, size);
    check_supported(config, options);
  });
  mine.refusal = to_refusal(refusal);
  const auto all = exchange(communicator.get(), mine, timeout);
  agree(all, rank, refusal);
  check_same_config(all);

  const int num_threads = choose_num_threads(all, rank, options);
  MemoryPlan plan;
  std::unique_ptr<Backend> backend;
  std::shared_ptr<SlotLedger> slots;
  const std::optional<Error> failure = error_of([&] {
    plan = plan_memory(config, size, {.backend = options.backend, .num_threads = num_threads});
    slots = std::make_shared<SlotLedger>(plan.num_slots, config.max_moe_layers_per_activation_slot);
    const auto make_backend = is_cuda ? cuda::make_backend : cpu::make_backend;
    backend = make_backend({.config = config,
                            .plan = plan,
                            .communicator = communicator,
                            .timeout = timeout,
                            .context_number = all[0].context_number,
                            .num_threads = num_threads,
                            .device = options.device,
                            .rank = rank,
                            .size = size});
  });
  mine.refusal = to_refusal(failure);
  agree(exchange(communicator.get(), mine, timeout), rank, failure);

  const std::optional<Error> unconnected = error_of([&] { backend->connect(); });
  mine.refusal = to_refusal(unconnected);
  agree(exchange(communicator.get(), mine, timeout), rank, unconnected);
  return std::make_unique<ContextImpl>(
      config, std::move(plan), std::move(backend), std::move(slots), communicator, timeout, rank,
      size, is_cuda ? Device{DeviceType::kCuda, options.device} : Device{});
}

}  // namespace

std::unique_ptr<ContextImpl> create_context(const Config& config,
                                            const std::shared_ptr<Communicator>& communicator,
                                            const ContextOptions& options, const Error* reason) {
  try {
    return agree_on_context(config, communicator, options, reason);
  } catch (const Error&) {
    throw;
  } catch (...) {
    // Between the exchanges, so that the peers wait in one.
    const Error error = current_error("creating a context");
    if (communicator != nullptr) communicator->abort(error.what());
    throw Error(error);
  }
}

}  // namespace distmoe
