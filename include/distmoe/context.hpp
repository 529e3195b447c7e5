// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "distmoe/communicator.hpp"
#include "distmoe/config.hpp"
#include "distmoe/export.hpp"
#include "distmoe/memory_plan.hpp"
#include "distmoe/tensor.hpp"

namespace distmoe {

struct ContextOptions {
  BackendKind backend = BackendKind::kCpu;
  /// CPU: worker threads of this rank. 0 takes DISTMOE_NUM_THREADS, or the cores of this machine
  /// divided by the ranks that share it. Results do not depend on it.
  int num_threads = 0;
  int device = 0;  ///< CUDA ordinal of this rank; may differ from rank to rank, or be shared
};

/// Facts of the last call of a context, on this rank. Of one that failed on a device nothing below
/// `tokens` is known: the vectors are empty, the numbers 0.
struct CallStatistics {
  std::int64_t call = 0;                      ///< counts from 1; 0 before the first
  std::int64_t tokens = 0;                    ///< T of this rank
  std::vector<std::int64_t> rows_per_rank;    ///< R of every rank
  std::vector<std::int64_t> rows_per_expert;  ///< of every expert of the group
  double rank_imbalance = 0.0;  ///< rows of the busiest rank / mean rows of a rank; 0 without rows
  double expert_imbalance = 0.0;          ///< the same of experts
  std::int64_t dropped_routes = 0;        ///< always 0: distmoe never drops
  std::int64_t device_scratch_bytes = 0;  ///< that the call's rows take on this rank
  std::int64_t host_scratch_bytes = 0;
  std::int64_t slot = -1;        ///< of a saving forward or a backward, else -1
  std::int64_t slot_layer = -1;  ///< its place in the slot, from 0, else -1
  bool is_recomputed = false;    ///< a saving forward that kept its input alone: backward computes
                                 ///< the rest again, with the same bits; true for that backward too
};

class ContextImpl;
class SavedForward;

/// Owns the communication buffers, activation slots and scratch of one rank, as planned by
/// `plan_memory`. Made collectively by all ranks of a communicator; used by one thread at a time.
class DISTMOE_EXPORT Context {
 public:
  /// Collective. Every rank gets peer_mismatch where configurations differ. Throws invalid_argument
  /// (config), unsupported (a precision or backend that this build lacks), out_of_memory.
  static Context create(const Config& config, std::shared_ptr<Communicator> communicator,
                        const ContextOptions& options = {});
  /// A context of a single rank, without a communicator.
  static Context create(const Config& config, const ContextOptions& options = {});

  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  Context(Context&&) noexcept;
  Context& operator=(Context&&) noexcept;
  /// Closes without waiting for peers.
  ~Context();

  const Config& config() const;
  const MemoryPlan& memory_plan() const;
  int rank() const;
  int size() const;
  /// First expert of this rank and how many it owns. Experts are split in contiguous blocks; the
  /// first E mod P ranks own one more.
  std::int64_t first_expert() const;
  std::int64_t num_local_experts() const;
  /// Waits for the calls of this context (replays of a captured call are the caller's to wait for:
  /// synchronise their stream first) and throws the first fault since the last
  /// check, the same on every rank: on CUDA the calls themselves do not wait, and a call that fails
  /// on the device (an id outside the contract, more rows than planned, a peer that did not come)
  /// fills its outputs with NaN. On the CPU every call throws by itself and check() has nothing to
  /// say.
  void check();
  /// The statistics of the last call that was routed, so asked after each layer those of each;
  /// costs a copy of what every call knows anyway. On CUDA it waits for the device. Around CUDA
  /// graphs number, tokens and slot are of the last call that the host made, captured ones
  /// included, and the rest of the last one that ran, a replay too once its stream was waited for.
  CallStatistics last_call() const;
  /// Makes `slot` the one of the saving forwards to come, `num_moe_layers` of them at a time. At
  /// first slot 0 is selected with the full depth. What a forward kept stays where it is, whatever
  /// is selected later. Local, but all ranks select alike: their next saving forward is
  /// peer_mismatch otherwise, which closes the context. Without effect for inference.
  ///
  /// Throws invalid_argument, and changes nothing, for a slot outside [0, num_activation_slots), a
  /// depth outside [1, max_moe_layers_per_activation_slot], and a depth of a slot in use that is
  /// less than its live forwards or more than it was selected with.
  void select_activation_slot(std::int64_t slot, std::int64_t num_moe_layers);
  std::int64_t selected_activation_slot() const;  ///< 0 after close()
  /// Gives back what `saved` kept, as if its forward had not saved: for one whose backward will not
  /// come, because activation checkpointing runs the forward again. `saved` is of no forward then.
  /// Local, but all ranks discard alike: their next saving forward is peer_mismatch otherwise.
  /// `stream` as in CallOptions, after the forward.
  ///
  /// Throws invalid_argument, and changes nothing, where a backward would be refused: for one that
  /// had its backward, is not the last live one of its slot, of another context or of before a
  /// reset().
  void discard(SavedForward&& saved, void* stream = nullptr);
  /// After an aborted schedule: empties all slots, selects slot 0 with the full depth and forgets
  /// the peaks. Every SavedForward of this context is stale from then on. Local; all ranks reset.
  void reset();
  /// Since creation or the last reset(); on CUDA it waits for the device.
  RegionPeaks region_peaks() const;
  /// Bytes that this context holds now, counted by its allocator; 0 after close().
  std::int64_t allocated_bytes() const;

  /// Frees everything. Idempotent; not collective. Every later call throws closed, as one on a
  /// context that was moved from does.
  void close();
  bool is_closed() const noexcept;

  ContextImpl& impl() const;  ///< for distmoe itself; throws closed where moved from

 private:
  explicit Context(std::unique_ptr<ContextImpl> impl);
  std::unique_ptr<ContextImpl> impl_;
};

}  // namespace distmoe
