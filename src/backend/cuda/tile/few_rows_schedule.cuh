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

/// A position in the ring of stages and the parity of its barriers' current use.
class FewRowsStage {
 public:
  __device__ __forceinline__ explicit FewRowsStage(const FewRowsRing& ring)
      : num_stages_(ring.num_stages) {}
  __device__ __forceinline__ void advance() {
    if (++slot == num_stages_) {
      slot = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void advance_by(int steps) {
    const int to = slot + steps;
    const int rounds = to / num_stages_;
    parity ^= static_cast<std::uint32_t>(rounds) & 1;
    slot = to - rounds * num_stages_;
  }

  int slot = 0;
  std::uint32_t parity = 0;

 private:
  int num_stages_;
};
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
  /// `token_tiles`: tables.num_tiles, or 0 for a call that computes nothing.
  __device__ FewRowsSchedule(const FewRowsArgs& args, const FewRowsTables& tables, int token_tiles)
      : tables_(tables),
        weight_tiles_(args),
        tokens_(args.tiles.tokens),
        w13_tiles_(token_tiles * weight_tiles_.w13),
        // All routes of one token share a tile of W2.
        num_tiles_(w13_tiles_ + (args.tiles.is_one_token != 0 ? min(token_tiles, 1) : token_tiles) *
                                    weight_tiles_.w2) {}

  __device__ FewRowsTile tile(int number) const {
    FewRowsTile tile{};
    tile.expert = -1;
    if (number >= num_tiles_) return tile;
    const bool is_w2 = number >= w13_tiles_;
    if (is_w2) number -= w13_tiles_;
    const int weight_tiles = is_w2 ? weight_tiles_.w2 : weight_tiles_.w13;
    const int token_tile = number / weight_tiles;
    tile.product = static_cast<std::int32_t>(is_w2 ? Product::kW2 : Product::kW13);
    tile.weight_tile = number - token_tile * weight_tiles;
    tile.group = group_of(token_tile);
    const FewRowsGroup group = tables_.groups[tile.group];
    tile.expert = static_cast<int>(group.expert);
    tile.row_begin = static_cast<int>(group.row_begin) +
                     (token_tile - static_cast<int>(group.first_tile)) * tokens_;
    tile.num_rows =
        min(static_cast<int>(tables_.groups[tile.group + 1].row_begin) - tile.row_begin, tokens_);
    return tile;
  }

  /// Whether every block has drawn a number that has no tile, the one of `number` last.
  __device__ bool is_last(int number) const {
    return number + 1 == num_tiles_ + static_cast<int>(gridDim.x);
  }

 private:
  /// The last group that begins at or before a tile of token rows.
  __device__ int group_of(int token_tile) const {
    int begin = 0;
    int end = tables_.num_groups;
    if (end == tables_.num_tiles) return token_tile;  // one each
    while (end - begin > 1) {
      const int middle = (begin + end) / 2;
      if (static_cast<int>(tables_.groups[middle].first_tile) <= token_tile) {
        begin = middle;
      } else {
        end = middle;
      }
    }
    return begin;
  }

  const FewRowsTables& tables_;
  FewRowsWeightTiles weight_tiles_;
  int tokens_;
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
