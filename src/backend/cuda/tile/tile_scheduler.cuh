// SPDX-License-Identifier: Apache-2.0
//
// Persistent, dynamic schedule of the grouped GEMM. One warp of each cluster's leading block draws
// tile numbers from a counter in the call frame, looks up what they stand for and writes it into
// the work rings of both blocks, where every role reads it.
//
// Order: groups as they stand in the table; inside a group weight tiles from first to last and, for
// each, all token pairs, so that clusters that run at a time share weights (all pairs) and tokens
// (consecutive weight tiles) in L2. Groups of many pairs are cut into blocks of at most
// kPairsAtATime.
#pragma once

#include <cstdint>

#include "backend/cuda/call_frame.hpp"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/tile/gemm_storage.hpp"
#include "backend/cuda/tile/ring_position.cuh"

namespace distmoe::cuda {

inline constexpr std::uint32_t kAllLanes = 0xFFFFFFFFu;

/// Draws tiles. All members are called by one whole warp.
class TileSource {
 public:
  /// Only the leading block's source draws.
  __device__ TileSource(CallFrame* frame, const TileGroup* groups, Product product,
                        int weight_tiles, bool is_leader)
      : counter_(&frame->next_tile[static_cast<int>(product)]),
        groups_(groups),
        num_groups_(frame->counts[static_cast<int>(product)].num_groups),
        num_tiles_(frame->counts[static_cast<int>(product)].num_pairs * weight_tiles),
        weight_tiles_(weight_tiles),
        lane_(static_cast<int>(threadIdx.x % 32)) {
    if (!is_leader) return;
    draw();
    load_window(0);
  }

  /// The next work: of the cluster's block 0 in lane 0, of block 1 in lane 1. The counter's answer
  /// for the tile after it is under way.
  __device__ TileWork next() {
    TileWork work{};
    const int tile = __shfl_sync(kAllLanes, drawn_, 0);
    if (tile >= num_tiles_) {
      work.expert = -1;
      return work;
    }
    draw();
    std::uint32_t holds = __ballot_sync(kAllLanes, tile < window_end());
    while (holds == 0) {
      load_window(window_begin_ + 32);
      holds = __ballot_sync(kAllLanes, tile < window_end());
    }
    return decode(tile, __ffs(static_cast<int>(holds)) - 1);
  }

 private:
  __device__ void draw() {
    if (lane_ == 0) drawn_ = atomicAdd(counter_, 1);
  }

  /// First tile number after this lane's group; groups past the last one end after every tile.
  __device__ int window_end() const {
    return has_group_ ? (group_.first_pair + group_.num_pairs) * weight_tiles_ : 0x7FFFFFFF;
  }

  __device__ void load_window(int begin) {
    window_begin_ = begin;
    has_group_ = begin + lane_ < num_groups_;
    if (has_group_) group_ = groups_[begin + lane_];
  }

  __device__ TileWork decode(int tile, int owner) const {
    const int first_pair = __shfl_sync(kAllLanes, group_.first_pair, owner);
    const int num_pairs = __shfl_sync(kAllLanes, group_.num_pairs, owner);
    const int local = tile - first_pair * weight_tiles_;
    const int num_blocks = (num_pairs + kPairsAtATime - 1) / kPairsAtATime;
    const int block_pairs = (num_pairs + num_blocks - 1) / num_blocks;
    const int block = local / (block_pairs * weight_tiles_);
    const int in_block = local - block * block_pairs * weight_tiles_;
    const int pairs = min(block_pairs, num_pairs - block * block_pairs);
    const int weight_tile = in_block / pairs;
    const int pair = block * block_pairs + in_block - weight_tile * pairs;
    TileWork work{};
    work.expert = __shfl_sync(kAllLanes, group_.expert, owner);
    work.weight_row = weight_tile * kWeightRows;
    const TokenTiling tiling = {num_pairs, __shfl_sync(kAllLanes, group_.rows_per_tile, owner)};
    const TileSpan span = tile_span(__shfl_sync(kAllLanes, group_.num_rows, owner), tiling,
                                    pair * kTilesPerPair + min(lane_, kTilesPerPair - 1));
    work.row_begin = __shfl_sync(kAllLanes, group_.row_begin, owner) + span.begin;
    work.num_rows = span.count;
    work.needs_gather = __shfl_sync(kAllLanes, group_.needs_gather, owner);
    return work;
  }

  std::int32_t* counter_;
  const TileGroup* groups_;
  int num_groups_;
  int num_tiles_;
  int weight_tiles_;
  int lane_;
  int drawn_ = 0;
  int window_begin_ = 0;
  bool has_group_ = false;
  TileGroup group_{};
};

/// Hands work to both blocks of the cluster; used by the warp that owns the TileSource.
class WorkPublisher {
 public:
  __device__ void publish(GemmStorage& shared, const TileWork& work) {
    ptx::wait(&shared.work_empty[position_.slot], position_.parity ^ 1);
    const auto lane = threadIdx.x % 32;
    if (lane < kClusterBlocks) {
      const std::int32_t words[2][4] = {
          {work.expert, work.weight_row, work.row_begin, work.num_rows},
          {work.needs_gather, 0, 0, 0}};
      auto* twin =
          reinterpret_cast<std::int32_t*>(ptx::twin_in_cluster(&shared.work[position_.slot], lane));
      std::uint64_t* full = ptx::twin_in_cluster(&shared.work_full[position_.slot], lane);
      for (int i = 0; i < 2; ++i) {
        ::cuda::ptx::st_async(twin + 4 * i, words[i], full);
      }
    }
    __syncwarp();
    position_.advance();
  }

 private:
  RingPosition<kWorkSlots> position_;
};

/// One warp's view of the work ring. One reader per block announces the bytes that make a slot
/// full.
template <bool kAnnounces = false>
class WorkReader {
 public:
  __device__ TileWork next(GemmStorage& shared) {
    if (kAnnounces && threadIdx.x % 32 == 0) {
      ::cuda::ptx::mbarrier_arrive_expect_tx(::cuda::ptx::sem_release, ::cuda::ptx::scope_cta,
                                             ::cuda::ptx::space_shared,
                                             &shared.work_full[position_.slot], sizeof(TileWork));
    }
    ptx::wait(&shared.work_full[position_.slot], position_.parity);
    const TileWork work = shared.work[position_.slot];
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ptx::arrive_after_reads(ptx::twin_in_cluster(&shared.work_empty[position_.slot], 0));
    }
    position_.advance();
    return work;
  }

 private:
  RingPosition<kWorkSlots> position_;
};

/// Warps that read the work ring, in both blocks.
inline constexpr int kWorkReaders = kClusterBlocks * (1 + kGatherWarps + kConsumerWarps);

}  // namespace distmoe::cuda
