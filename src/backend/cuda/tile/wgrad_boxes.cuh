// SPDX-License-Identifier: Apache-2.0
//
// A weight's gradient between accumulators and memory through shared memory, in boxes of 16 rows x
// 128 bytes, each warp for itself:
//
//   fresh   accumulators -> box -> bulk store
//   added   bulk load -> box, while products run; box + accumulators -> box -> bulk store. FP32 has
//           twice as many boxes as there is room for: the second half is stored by bulk additions
#pragma once

#include <cuda.h>

#include <cuda/ptx>

#include <cstdint>

#include "backend/cuda/kernels/sm90_bf16_wgrad.hpp"
#include "backend/cuda/ptx/shared_copy.cuh"
#include "backend/cuda/tile/named_barrier.cuh"
#include "backend/cuda/tile/wgrad_storage.hpp"
#include "backend/cuda/tile/wgrad_store.cuh"

namespace distmoe::cuda {

/// Rows of a warpgroup's instruction, 16 of each warp.
inline constexpr int kInstructionM = kGradientBoxRows * kWarpgroupThreads / 32;

/// Columns of a box.
template <bool kIsFloat>
inline constexpr int kGradientBoxColumns = kRowBytes / (kIsFloat ? 4 : 2);

/// Box `box` of a warp: the first of its 16 rows and its first column. Row by row.
template <bool kIsFloat>
__device__ __forceinline__ GradientPlace place_of_box(const GradientPlace& tile, int warp,
                                                      int box) {
  constexpr int kOfRows = kWgradN / kGradientBoxColumns<kIsFloat>;
  return {tile.expert, tile.m + box / kOfRows * kInstructionM + warp * kGradientBoxRows,
          tile.n + box % kOfRows * kGradientBoxColumns<kIsFloat>};
}

/// Where a box lies: a map and coordinates in it.
struct GradientBox {
  const CUtensorMap* map;
  std::int32_t at[3];
};

__device__ __forceinline__ GradientBox box_at(const WgradArgs& args, const WgradMaps& maps,
                                              const GradientPlace& place) {
  const auto half_rows = static_cast<int>(rows_of_half(args.out, args.m));
  if (place.m < half_rows) return {&maps.out, {place.n, place.m, place.expert}};
  return {&maps.second_half, {place.n, place.m - half_rows, place.expert}};
}

/// A warp's accumulators of a box and their places in shared memory, where chunk c of 16 bytes of
/// row r lies at c ^ (r % 8).
template <bool kIsFloat>
class BoxValues;

/// 64 columns: a lane has 16 bytes of each of four matrices at a time.
template <>
class BoxValues<false> {
 public:
  __device__ __forceinline__ BoxValues(float* acc, std::uint32_t box, int lane)
      : acc_(acc), lane_(lane), box_(box) {}

  /// Adds what is there.
  __device__ __forceinline__ void add() {
    std::uint32_t there[kPairs][4];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) ptx::ldmatrix_x4(address(pair), there[pair]);
#pragma unroll
    for (int i = 0; i < 4 * kPairs; ++i) {
      const std::uint32_t two = there[i / 4][i % 4];
      acc_[2 * i] = __fadd_rn(__uint_as_float(two << 16), acc_[2 * i]);
      acc_[2 * i + 1] = __fadd_rn(__uint_as_float(two & 0xFFFF0000u), acc_[2 * i + 1]);
    }
  }
  __device__ __forceinline__ void put() const {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const float* values = acc_ + 8 * pair;
      ptx::stmatrix_x4(address(pair),
                       {rounded_pair(values[0], values[1]), rounded_pair(values[2], values[3]),
                        rounded_pair(values[4], values[5]), rounded_pair(values[6], values[7])});
    }
  }

 private:
  static constexpr int kPairs = 4;  ///< of blocks of eight columns

  __device__ __forceinline__ std::uint32_t address(int pair) const {
    const int matrix = lane_ / 8;
    const int row = matrix % 2 * 8 + lane_ % 8;
    return box_ + row * kRowBytes + (((2 * pair + matrix / 2) ^ (row & 7)) << 4);
  }

  float* acc_;
  int lane_;
  std::uint32_t box_;
};

/// 32 columns, four blocks: a lane has 8 bytes at a time. Lanes of odd rows take blocks 2, 3, 0, 1:
/// with the order of the others two rows would meet in the same banks.
template <>
class BoxValues<true> {
 public:
  __device__ __forceinline__ BoxValues(const float* acc, std::uint32_t box, int lane)
      : first_block_(lane / 4 % 2 * 2), lane_(lane), box_(box) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      values_[i] = first_block_ == 0 ? acc[i] : acc[(i + kValues / 2) % kValues];
    }
  }

  __device__ __forceinline__ void add() {
    float2 there[kValues / 2];
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) there[i] = ptx::load_shared_8(address(i));
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      values_[2 * i] = __fadd_rn(there[i].x, values_[2 * i]);
      values_[2 * i + 1] = __fadd_rn(there[i].y, values_[2 * i + 1]);
    }
  }
  __device__ __forceinline__ void put() const {
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      ptx::store_shared_8(address(i), values_[2 * i], values_[2 * i + 1]);
    }
  }

 private:
  static constexpr int kValues = 16;

  /// Of values 2i and 2i + 1: rows 8 to 15 where i is odd.
  __device__ __forceinline__ std::uint32_t address(int i) const {
    const int row = lane_ / 4;
    const int chunk = 2 * (i / 2 ^ first_block_) + lane_ % 4 / 2;
    return box_ + (row + i % 2 * 8) * kRowBytes + ((chunk ^ row) << 4) + lane_ % 2 * 8;
  }

  float values_[kValues];
  int first_block_;
  int lane_;
  std::uint32_t box_;
};

/// By the thread that issued them: at most `kPending` of the stores of boxes have yet to read them.
template <int kPending>
__device__ __forceinline__ void wait_for_bulk_reads() {
  ::cuda::ptx::cp_async_bulk_wait_group_read(::cuda::ptx::n32_t<kPending>{});
}

/// Boxes of a warp's tile that are loaded while its products run, where it is added to: as many as
/// have room. The others are added in L2, which takes 0.29e12 FP32 a second of an H200.
template <typename Policy>
inline constexpr int kLoadedBoxes =
    Policy::kHasBoxes && Policy::kAccumulates ? Policy::Storage::kBoxes : 0;

/// Loads what the first boxes of a warp's tile are added to, one by one.
template <typename Policy>
class AddedBoxes {
 public:
  __device__ __forceinline__ AddedBoxes(const WgradArgs& args, const WgradMaps& maps,
                                        const GradientPlace& tile, typename Policy::Storage& shared,
                                        const ConsumerThread& self)
      : args_(args),
        maps_(maps),
        tile_(tile),
        shared_(shared),
        self_(self),
        warp_(self.warpgroup * (kWarpgroupThreads / 32) + self.warp) {}

  /// By all of the warp: the next box, if one is left. The stores of the tile before have read it.
  __device__ __forceinline__ void load_next() {
    if (next_ == kLoadedBoxes<Policy>) return;
    if (self_.lane == 0) {
      if (next_ == 0) wait_for_bulk_reads<0>();
      const GradientPlace place = place_of_box<Policy::kIsFloat>(tile_, self_.warp, next_);
      const bool is_loaded = is_inside(args_, place);
      ::cuda::ptx::mbarrier_arrive_expect_tx(::cuda::ptx::sem_release, ::cuda::ptx::scope_cta,
                                             ::cuda::ptx::space_shared, barrier(),
                                             is_loaded ? kGradientBoxBytes : 0);
      if (is_loaded) {
        const auto [map, at] = box_at(args_, maps_, place);
        ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_cluster, ::cuda::ptx::space_global,
                                          shared_.boxes[warp_][next_], map, at, barrier());
      }
    }
    ++next_;
  }
  /// Completes with every box's load.
  __device__ __forceinline__ std::uint64_t* barrier() const { return &shared_.added[warp_]; }
  __device__ __forceinline__ void load_all() {
    while (next_ < kLoadedBoxes<Policy>) load_next();
  }

 private:
  const WgradArgs& args_;
  const WgradMaps& maps_;
  const GradientPlace& tile_;
  typename Policy::Storage& shared_;
  const ConsumerThread& self_;
  int warp_;  ///< of the consumer warps
  int next_ = 0;
};

/// A warp's box to its place, by one thread.
template <bool kAddsInL2>
__device__ __forceinline__ void store_box(const WgradArgs& args, const WgradMaps& maps,
                                          const GradientPlace& place, const std::uint8_t* staged) {
  if (is_inside(args, place)) {
    const auto [map, at] = box_at(args, maps, place);
    if constexpr (kAddsInL2) {
      ::cuda::ptx::cp_reduce_async_bulk_tensor(::cuda::ptx::space_global,
                                               ::cuda::ptx::space_shared, ::cuda::ptx::op_add, map,
                                               at, staged);
    } else {
      ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_global, ::cuda::ptx::space_shared, map,
                                        at, staged);
    }
  }
  ::cuda::ptx::cp_async_bulk_commit_group();
}

/// Box kBox of a warp's part of its warpgroup's tile, and those after it.
template <typename Policy, int kBox = 0>
__device__ __forceinline__ void store_boxes(const WgradArgs& args, const WgradMaps& maps,
                                            WgradAccumulators& acc, const GradientPlace& tile,
                                            typename Policy::Storage& shared,
                                            const ConsumerThread& self) {
  constexpr int kBoxes = Policy::Storage::kBoxes;
  constexpr int kColumns = kGradientBoxColumns<Policy::kIsFloat>;
  constexpr int kOfRows = kWgradN / kColumns;
  if constexpr (kBox < kWgradWarpgroupM / kInstructionM * kOfRows) {
    constexpr bool kIsLoaded = kBox < kLoadedBoxes<Policy>;
    constexpr bool kAddsInL2 = Policy::kAccumulates && !kIsLoaded;
    static_assert(!kAddsInL2 || Policy::kIsFloat, "BF16 would be rounded before the sum and after");
    const int warp = self.warpgroup * (kWarpgroupThreads / 32) + self.warp;
    std::uint8_t* staged = shared.boxes[warp][kBox % kBoxes];
    BoxValues<Policy::kIsFloat> values(acc[kBox / kOfRows] + kBox % kOfRows * (kColumns / 2),
                                       ptx::shared_address(staged), self.lane);
    if constexpr (kIsLoaded) {
      values.add();
    } else {
      if (self.lane == 0) wait_for_bulk_reads<kBoxes - 1>();
    }
    __syncwarp();
    values.put();
    // Bulk stores read through the async proxy.
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
    __syncwarp();
    if (self.lane == 0) {
      store_box<kAddsInL2>(args, maps, place_of_box<Policy::kIsFloat>(tile, self.warp, kBox),
                           staged);
    }
    store_boxes<Policy, kBox + 1>(args, maps, acc, tile, shared, self);
  }
}

}  // namespace distmoe::cuda
