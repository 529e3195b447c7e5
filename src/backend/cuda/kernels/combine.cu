// SPDX-License-Identifier: Apache-2.0
//
// One block a token; a thread owns 8 columns at a time. The product and the sum each round once, as
// the CPU's do.
//
// Where the launch meets the peers itself, its first block does it as peer_barrier does and tells
// the others, which wait for it: so all blocks take the call for failed, or none.
#include "backend/cuda/kernels/combine.hpp"

#include <type_traits>

#include "backend/cuda/kernels/first_fault.cuh"
#include "backend/cuda/kernels/launch.cuh"
#include "backend/cuda/kernels/load_kernels.hpp"
#include "backend/cuda/kernels/norm_row.cuh"
#include "backend/cuda/kernels/peer_meeting.cuh"
#include "backend/cuda/kernels/score.cuh"
#include "backend/cuda/kernels/weighted_row.cuh"
#include "backend/cuda/ptx/grid_dependency.cuh"
#include "backend/cuda/select/launch_shapes.hpp"
#include "plan/expert_partition.hpp"

namespace distmoe::cuda {
namespace {

constexpr int kColumns = 8;
constexpr std::uint32_t kTwoNaNs = 0x7FFF7FFFu;

/// Fills a token's y of a failed call, and keeps its fault.
__device__ void fail(const CombineArgs& args, uint4* y, int num_vectors) {
  for (int vector = static_cast<int>(threadIdx.x); vector < num_vectors;
       vector += static_cast<int>(blockDim.x)) {
    y[vector] = {kTwoNaNs, kTwoNaNs, kTwoNaNs, kTwoNaNs};
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) keep_first_fault(*args.state, *args.frame);
}

/// By whole blocks. The first one's wait is bounded, and it tells the others whatever came of it,
/// so that theirs is bounded too.
__device__ void meet_peers_first(const CombineArgs& args) {
  if (args.meets_peers == 0) return;
  if (blockIdx.x == 0) {
    meet_peers(args.meeting);
    __syncthreads();
    if (threadIdx.x == 0) ptx::store_release_gpu(&args.frame->has_met, 1);
  } else {
    if (threadIdx.x == 0) {
      while (ptx::load_acquire_gpu(&args.frame->has_met) == 0) {
      }
    }
    __syncthreads();
  }
}

/// A token's routes, k in order, of some columns.
class ScaledSums {
 public:
  __device__ ScaledSums(const NormArgs&, int /*first_column*/) {}
  __device__ void add(const PackedColumns<kColumns>& h3, float score, float /*rstd*/) {
    add_scaled(h3, score, sums_);
  }
  __device__ const float (&sums() const)[kColumns] { return sums_; }

 private:
  float sums_[kColumns] = {};
};

/// Of every route of a token, a warp a route; by whole blocks.
__device__ void find_rstd(const CombineArgs& args, const std::int32_t* ids, const uint4* rows,
                          float* rstd) {
  const int num_vectors = args.hidden_dim / kColumns;
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int k = static_cast<int>(threadIdx.x / 32); k < args.top_k;
       k += static_cast<int>(blockDim.x / 32)) {
    if (ids[k] < 0) continue;
    const float value = inverse_rms(&rows[static_cast<std::int64_t>(k) * num_vectors], num_vectors,
                                    args.norm.eps, lane);
    if (lane == 0) rstd[k] = value;
  }
  __syncthreads();
}

template <typename Sums>
__global__ void __launch_bounds__(kMostCombineThreads)
    combine(const __grid_constant__ CombineArgs args) {
  extern __shared__ float scores[];  // [K], then the ids [K], then with a norm rstd [K]
  auto* ids = reinterpret_cast<std::int32_t*>(scores + args.top_k);
  auto* rstd = reinterpret_cast<float*>(ids + args.top_k);
  if (args.meets_peers != 0) prefetch_windows(args.meeting);
  ptx::wait_for_earlier_kernels();
  const std::int64_t token = blockIdx.x;
  const int num_threads = static_cast<int>(blockDim.x);
  for (int k = static_cast<int>(threadIdx.x); k < args.top_k; k += num_threads) {
    ids[k] = args.ids[token * args.top_k + k];
    scores[k] = load_score(args, token, k);
  }
  meet_peers_first(args);
  __syncthreads();
  auto* y = reinterpret_cast<uint4*>(args.y + token * args.y_stride_bytes);
  const int num_vectors = args.hidden_dim / kColumns;
  if (args.frame->failed != 0) return fail(args, y, num_vectors);
  const std::uint64_t kept = args.results_at != nullptr ? *args.results_at : 0;
  const auto* rows = reinterpret_cast<const uint4*>(kept != 0 ? kept : args.results) +
                     token * args.top_k * num_vectors;
  constexpr bool kIsNormed = !std::is_same_v<Sums, ScaledSums>;
  if (kIsNormed) find_rstd(args, ids, rows, rstd);
  for (int vector = static_cast<int>(threadIdx.x); vector < num_vectors; vector += num_threads) {
    Sums sums(args.norm, vector * kColumns);
#pragma unroll 4
    for (int k = 0; k < args.top_k; ++k) {
      if (ids[k] < 0) continue;
      sums.add(unpack(__ldcs(&rows[std::int64_t{k} * num_vectors + vector])), scores[k],
               kIsNormed ? rstd[k] : 1.0f);
    }
    y[vector] = vector_of(round_columns(sums.sums()));
  }
}

/// A token of this rank with combine per_rank, in shared memory.
struct RankedToken {
  std::uint64_t* h3;    ///< [K] addresses of this rank's rows, 0: another's or none
  float* scores;        ///< [K]
  std::int32_t* owner;  ///< [K] rank that computes the route, -1: none
  std::int32_t* ranks;  ///< [K] that have a route, ascending; then how many

  __device__ RankedToken(std::uint64_t* storage, int top_k)
      : h3(storage),
        scores(reinterpret_cast<float*>(storage + top_k)),
        owner(reinterpret_cast<std::int32_t*>(scores + top_k)),
        ranks(owner + top_k) {}

  __device__ void load(const CombineArgs& args, std::int64_t token) const {
    for (int k = static_cast<int>(threadIdx.x); k < args.top_k; k += static_cast<int>(blockDim.x)) {
      const std::int64_t route = token * args.top_k + k;
      const std::int32_t id = args.ids[route];
      owner[k] =
          id < 0 ? -1
                 : static_cast<std::int32_t>(expert_owner(args.num_experts, args.num_ranks, id));
      h3[k] = owner[k] == args.rank ? row_address(args.h3, args.row_of_route[route]) : 0;
      scores[k] = load_score(args, token, k);
    }
    __syncthreads();
    if (threadIdx.x == 0) list_ranks(args.top_k);
    __syncthreads();
  }

 private:
  __device__ void list_ranks(int top_k) const {
    int count = 0;
    for (int k = 0; k < top_k; ++k) {
      if (owner[k] < 0) continue;
      int at = count;
      while (at > 0 && ranks[at - 1] > owner[k]) --at;
      if (at > 0 && ranks[at - 1] == owner[k]) continue;
      for (int i = count; i > at; --i) ranks[i] = ranks[i - 1];
      ranks[at] = owner[k];
      ++count;
    }
    ranks[top_k] = count;
  }
};

/// 16 bytes each, of kColumns FP32.
constexpr int kFloatVectors = kColumns / 4;

__global__ void __launch_bounds__(kMostCombineThreads)
    combine_ranks(const __grid_constant__ CombineArgs args) {
  extern __shared__ std::uint64_t storage[];
  if (args.meets_peers != 0) prefetch_windows(args.meeting);
  ptx::wait_for_earlier_kernels();
  const std::int64_t token = blockIdx.x;
  const int num_threads = static_cast<int>(blockDim.x);
  const int num_vectors = args.hidden_dim / kColumns;
  auto* y = reinterpret_cast<uint4*>(args.y + token * args.y_stride_bytes);
  const RankedToken routes(storage, args.top_k);
  // A call that fails in the meeting, later, may do so while blocks are here.
  if (__syncthreads_or(args.frame->failed) == 0) routes.load(args, token);
  meet_peers_first(args);
  __syncthreads();
  // A failed call has no rows.
  if (args.frame->failed != 0) return fail(args, y, num_vectors);
  const int num_ranks = routes.ranks[args.top_k];
  const auto* peers_sums = reinterpret_cast<const float4*>(args.results) +
                           token * args.sums_per_token * num_vectors * kFloatVectors;
  for (int vector = static_cast<int>(threadIdx.x); vector < num_vectors; vector += num_threads) {
    float sums[kColumns] = {};
    const float4* next = &peers_sums[vector * kFloatVectors];
    for (int place = 0; place < num_ranks; ++place) {
      alignas(sizeof(float4)) float part[kColumns] = {};
      if (routes.ranks[place] == args.rank) {
#pragma unroll 4
        for (int k = 0; k < args.top_k; ++k) {
          if (routes.h3[k] == 0) continue;
          add_scaled(unpack(__ldcs(reinterpret_cast<const uint4*>(routes.h3[k]) + vector)),
                     routes.scores[k], part);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kFloatVectors; ++i) {
          reinterpret_cast<float4*>(part)[i] = __ldcs(&next[i]);
        }
        next += num_vectors * kFloatVectors;
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[c] = __fadd_rn(sums[c], part[c]);
    }
    y[vector] = vector_of(round_columns(sums));
  }
}

/// The rest of a call without tokens.
__global__ void keep_fault(const __grid_constant__ CombineArgs args) {
  ptx::wait_for_earlier_kernels();
  keep_first_fault(*args.state, *args.frame);
}

}  // namespace

cudaError_t prepare_combine() {
  return load_kernels(combine<ScaledSums>, combine<NormedSums<kColumns>>, combine_ranks,
                      keep_fault);
}

cudaError_t launch_combine(const CombineArgs& args, cudaStream_t stream) {
  if (args.num_tokens == 0) return launch_early(keep_fault, kSingleThreadLaunch, stream, args);
  if (args.row_of_route != nullptr) {
    return launch_early(combine_ranks,
                        combine_ranks_launch(args.num_tokens, args.top_k, args.hidden_dim), stream,
                        args);
  }
  const LaunchShape shape =
      combine_launch(args.num_tokens, args.top_k, args.hidden_dim, args.norm.is_given != 0);
  if (args.norm.is_given != 0) {
    return launch_early(combine<NormedSums<kColumns>>, shape, stream, args);
  }
  return launch_early(combine<ScaledSums>, shape, stream, args);
}

}  // namespace distmoe::cuda
