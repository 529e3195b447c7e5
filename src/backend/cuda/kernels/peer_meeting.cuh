// SPDX-License-Identifier: Apache-2.0
//
// One flag word per (peer, barrier) in each rank's window, monotone epochs that are kept on the
// device. A thread serves one peer: it stores this rank's word into the peer's window with
// system-scope release, then waits, bounded by the global timer, for the peer's word with acquire.
//
// A rank that finds a peer missing, gone or failed where it had not failed itself is lost: it says
// so in all of its words at once, so that no peer waits for it, keeps the fault in the call state
// and takes no part in any later barrier. The rest of the call computes nothing. So does a rank
// whose host leaves.
#pragma once

#include <climits>

#include "backend/cuda/barrier_word.hpp"
#include "backend/cuda/kernels/peer_barrier.hpp"
#include "backend/cuda/ptx/flag.cuh"

namespace distmoe::cuda {

/// What the threads of the block know together.
struct Meeting {
  std::uint32_t epoch;
  std::int32_t has_failed;  ///< the call, before the barrier
  FaultKind lost;           ///< by what the call did before the barrier, or by its host
  std::int32_t missing;     ///< lowest peer that did not come, INT_MAX where all did
  std::int32_t gone;        ///< lowest peer that left, is lost or failed alone, likewise
  std::int32_t has_ended;   ///< != 0: a peer left, nobody waits any longer
};

/// The word of this rank in the window of a peer.
__device__ inline std::uint32_t* own_word(const PeerBarrierArgs& args, int peer,
                                          std::int64_t barrier) {
  auto* flags = reinterpret_cast<std::uint32_t*>(args.windows[peer].flags);
  return &flags[args.rank * kNumBarriers + barrier];
}

__device__ inline const std::uint32_t* word_of(const PeerBarrierArgs& args, int peer) {
  const auto* flags = reinterpret_cast<const std::uint32_t*>(args.windows[args.rank].flags);
  return &flags[peer * kNumBarriers + static_cast<std::int64_t>(args.barrier)];
}

/// Brings the peers' addresses near, which a later meeting asks for when nothing hides its loads.
__device__ inline void prefetch_windows(const PeerBarrierArgs& args) {
  if (static_cast<int>(threadIdx.x) < args.num_ranks) ptx::prefetch(&args.windows[threadIdx.x]);
}

/// By one thread.
__device__ inline Meeting begin_meeting(const PeerBarrierArgs& args) {
  std::uint32_t& count = args.state->barrier_epoch[static_cast<std::int64_t>(args.barrier)];
  const bool comes = args.part == BarrierPart::kWhole || args.part == BarrierPart::kSignal;
  if (comes) count += kEpochStep;
  Meeting meeting{count, args.frame->failed, FaultKind::kNone, INT_MAX, INT_MAX, 0};
  const FaultKind fault = args.frame->fault.kind;
  if (meeting.has_failed != 0 && is_final(fault)) meeting.lost = fault;
  if (args.part == BarrierPart::kLeave) meeting.lost = FaultKind::kLeft;
  return meeting;
}

/// What this rank says at a barrier at which it is, or was last.
__device__ inline std::uint32_t word_at(const PeerBarrierArgs& args, PeerBarrier barrier,
                                        const Meeting& meeting) {
  const std::uint32_t epoch = args.state->barrier_epoch[static_cast<std::int64_t>(barrier)];
  // What failed before the peers met, they find in what is published.
  const bool tells = barrier == PeerBarrier::kResultsStored && meeting.has_failed != 0;
  return epoch | (tells ? kCallFailedBit : 0);
}

__device__ inline void signal_peers(const PeerBarrierArgs& args, const Meeting& meeting) {
  const std::uint32_t word = word_at(args, args.barrier, meeting);
  for (int peer = static_cast<int>(threadIdx.x); peer < args.num_ranks;
       peer += static_cast<int>(blockDim.x)) {
    if (peer == args.rank) continue;
    ptx::store_release_sys(own_word(args, peer, static_cast<std::int64_t>(args.barrier)), word);
  }
}

__device__ inline void wait_for_peers(const PeerBarrierArgs& args, Meeting& meeting) {
  const std::uint64_t deadline = ptx::global_timer_ns() + args.timeout_ns;
  volatile std::int32_t& has_ended = meeting.has_ended;
  for (int peer = static_cast<int>(threadIdx.x); peer < args.num_ranks;
       peer += static_cast<int>(blockDim.x)) {
    if (peer == args.rank) continue;
    PeerState state = PeerState::kAwaited;
    bool is_late = false;
    while (true) {
      state = peer_state(ptx::load_acquire_sys(word_of(args, peer)), meeting.epoch);
      // Here, not behind the loop, where this thread's warp may wait for its other threads.
      if (state == PeerState::kLeft) has_ended = 1;
      is_late = ptx::global_timer_ns() > deadline;
      if (state != PeerState::kAwaited || is_late || has_ended != 0) break;
    }
    if (state == PeerState::kAwaited && is_late) atomicMin(&meeting.missing, peer);
    const bool failed_alone = state == PeerState::kCallFailed && meeting.has_failed == 0;
    if (state == PeerState::kLeft || state == PeerState::kGone || failed_alone) {
      atomicMin(&meeting.gone, peer);
    }
  }
}

/// Keeps why this rank is lost. By one thread. A peer that did not come comes before one that gave
/// up, which may have waited for the same.
__device__ inline void lose_peers(const PeerBarrierArgs& args, const Meeting& meeting) {
  FaultRecord fault = args.frame->fault;
  if (meeting.lost == FaultKind::kLeft) {
    fault = {FaultKind::kLeft, args.rank, 0, 0, 0};
  } else if (meeting.lost == FaultKind::kNone) {
    const bool is_missing = meeting.missing != INT_MAX;
    const int peer = is_missing ? meeting.missing : meeting.gone;
    const std::uint32_t seen = ptx::load_acquire_sys(word_of(args, peer));
    fault = {is_missing ? FaultKind::kPeerTimeout : FaultKind::kFailedOnPeer, peer, 0,
             meeting.epoch / kEpochStep, seen / kEpochStep};
  }
  args.state->lost = fault;
  args.state->lost_call = args.frame->call;
  if (meeting.has_failed != 0) return;
  args.frame->failed = 1;
  args.frame->fault = fault;
}

__device__ inline void leave_peers(const PeerBarrierArgs& args, const Meeting& meeting) {
  const bool has_left = args.state->lost.kind == FaultKind::kLeft;
  const std::uint32_t why = has_left ? kRankLeftBit : kRankLostBit;
  for (int i = static_cast<int>(threadIdx.x); i < args.num_ranks * kNumBarriers;
       i += static_cast<int>(blockDim.x)) {
    const int peer = i / kNumBarriers;
    const int barrier = i % kNumBarriers;
    if (peer == args.rank) continue;
    ptx::store_release_sys(own_word(args, peer, barrier),
                           word_at(args, static_cast<PeerBarrier>(barrier), meeting) | why);
  }
}

/// By one whole block, whose threads return when the outcome is in the frame and the state. What
/// they see of the device's writes is visible to a peer that has met this rank.
__device__ inline void meet_peers(const PeerBarrierArgs& args) {
  __shared__ Meeting meeting;
  const bool is_known = args.state->lost.kind != FaultKind::kNone;
  if (is_known && args.part != BarrierPart::kLeave) return;
  if (threadIdx.x == 0) meeting = begin_meeting(args);
  // NOTE: what the block has seen, all earlier kernels' writes too, comes before the flags: a
  // release covers what its thread has met at the barrier of the block.
  __syncthreads();
  if (meeting.lost == FaultKind::kNone) {
    if (args.part != BarrierPart::kWait) signal_peers(args, meeting);
    if (args.part == BarrierPart::kSignal) return;
    wait_for_peers(args, meeting);
    __syncthreads();
    if (meeting.missing == INT_MAX && meeting.gone == INT_MAX) return;
  }
  if (threadIdx.x == 0 && !is_known) lose_peers(args, meeting);
  __syncthreads();
  leave_peers(args, meeting);
}

}  // namespace distmoe::cuda
