// SPDX-License-Identifier: Apache-2.0
//
// Schedule of the kernel of few rows: all tiles of W13, group by group, then all tiles of W2, drawn
// in this order from a counter. A tile waits for tiles with smaller numbers alone, which running
// blocks have drawn already, so that the kernel ends whatever blocks the device runs at a time.
#pragma once

#include <cstdint>

#include "backend/cuda/kernels/sm90_bf16_few_rows.hpp"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/flag.cuh"
#include "backend/cuda/tile/ring_position.cuh"

namespace distmoe::cuda {

using FewRowsStage = RingPosition<kFewStages>;
/// Warps that read the work ring.
inline constexpr int kFewWorkReaders = kGatherWarps + kConsumerWarps;

/// How many tiles the weights of an expert make.
struct FewRowsWeightTiles {
  int w13;
  int w2;
  __device__ explicit FewRowsWeightTiles(const FewRowsArgs& args)
      : w13((args.w13.m + args.tiles.w13_rows - 1) / args.tiles.w13_rows),
        w2((args.w2.m + args.tiles.w2_rows - 1) / args.tiles.w2_rows) {}
};

/// What a block draws: the number of a tile, and the turn of the launch.
class FewRowsDraw {
 public:
  FewRowsDraw() = default;
  static __device__ __forceinline__ FewRowsDraw next(const FewRowsArgs& args) {
    return FewRowsDraw(atomicAdd(&args.counters->drawn, 1));
  }
  __device__ int number() const { return static_cast<int>(drawn_ & ~kTurn); }
  __device__ int turn() const { return drawn_ < kTurn ? 0 : 1; }
  /// By one thread, when all blocks have drawn their last number.
  __device__ void begin_next_turn(const FewRowsArgs& args) const {
    args.counters->drawn = turn() == 0 ? kTurn : 0;
  }

 private:
  static constexpr std::uint32_t kTurn = 1u << 31;
  __device__ explicit FewRowsDraw(std::uint32_t drawn) : drawn_(drawn) {}

  std::uint32_t drawn_ = 0;
};

class FewRowsSchedule {
 public:
  __device__ FewRowsSchedule(const FewRowsArgs& args, const FewRowsTables& tables, int num_groups)
      : tables_(tables),
        weight_tiles_(args),
        w13_tiles_(num_groups * weight_tiles_.w13),
        num_tiles_(w13_tiles_ + num_groups * weight_tiles_.w2) {}

  __device__ FewRowsTile tile(int number) const {
    FewRowsTile tile{};
    tile.expert = -1;
    if (number >= num_tiles_) return tile;
    const bool is_w2 = number >= w13_tiles_;
    if (is_w2) number -= w13_tiles_;
    const int weight_tiles = is_w2 ? weight_tiles_.w2 : weight_tiles_.w13;
    tile.product = static_cast<std::int32_t>(is_w2 ? Product::kW2 : Product::kW13);
    tile.group = number / weight_tiles;
    tile.weight_tile = number - tile.group * weight_tiles;
    const FewRowsGroup group = tables_.groups[tile.group];
    tile.expert = group.expert;
    tile.row_begin = group.row_begin;
    tile.num_rows = group.num_rows;
    return tile;
  }

  /// Whether every block has drawn a number that has no tile, the one of `number` last.
  __device__ bool is_last(int number) const {
    return number + 1 == num_tiles_ + static_cast<int>(gridDim.x);
  }

 private:
  const FewRowsTables& tables_;
  FewRowsWeightTiles weight_tiles_;
  int w13_tiles_;
  int num_tiles_;
};

/// By one thread.
class FewRowsWorkWriter {
 public:
  __device__ void write(FewRowsStorage& shared, const FewRowsTile& work) {
    ptx::wait(&shared.work_empty[position_.slot], position_.parity ^ 1);
    shared.work[position_.slot] = work;
    ptx::arrive(&shared.work_full[position_.slot]);
    position_.advance();
  }

 private:
  RingPosition<kWorkSlots> position_;
};

/// One warp's view of the work ring.
class FewRowsWorkReader {
 public:
  __device__ FewRowsTile next(FewRowsStorage& shared) {
    ptx::wait(&shared.work_full[position_.slot], position_.parity);
    const FewRowsTile work = shared.work[position_.slot];
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::arrive(&shared.work_empty[position_.slot]);
    position_.advance();
    return work;
  }

 private:
  RingPosition<kWorkSlots> position_;
};

}  // namespace distmoe::cuda
