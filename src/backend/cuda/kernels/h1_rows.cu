// SPDX-License-Identifier: Apache-2.0
//
// A thread eight columns of gate and up of a row at a time.
#include "backend/cuda/kernels/h1_rows.hpp"

#include "backend/cuda/kernels/launch.cuh"
#include "backend/cuda/kernels/load_kernels.hpp"
#include "backend/cuda/kernels/weighted_row.cuh"
#include "backend/cuda/tile/tile_epilogue.cuh"

namespace distmoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 8;

/// Calls `visit(gate, up, i)` with vector i of row-major [num_rows, width / kColumns].
template <typename Visit>
__device__ __forceinline__ void for_each_pair(std::uint64_t h1, int num_rows, int width,
                                              const Visit& visit) {
  const int per_row = width / kColumns;
  const std::int64_t count = std::int64_t{num_rows} * per_row;
  const auto* rows = reinterpret_cast<const uint4*>(h1);
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t row = i / per_row;
    const uint4* gate = rows + i + row * per_row;  // rows of h1 are twice as wide
    visit(unpack(gate[0]), unpack(gate[per_row]), i);
  }
}

template <bool kIsClamped>
__global__ void __launch_bounds__(kThreads) restore_h2(const __grid_constant__ RestoreH2Args args) {
  if (args.frame->failed != 0 || args.training->is_recomputed != 0) return;
  constexpr float kLog2E = 1.4426950408889634f;
  const float scale = kIsClamped ? -kLog2E * args.swiglu.alpha : -kLog2E;
  auto* h2 = reinterpret_cast<uint4*>(args.frame->scratch.h2);
  for_each_pair(
      args.training->h1, args.frame->num_rows, args.width,
      [&](const PackedColumns<kColumns>& gate, const PackedColumns<kColumns>& up, std::int64_t i) {
        float columns[kColumns];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          columns[c] =
              swiglu<kIsClamped>(column_of(gate, c), column_of(up, c), scale, args.swiglu.limit);
        }
        h2[i] = vector_of(round_columns(columns));
      });
}

__global__ void begin_clip(const __grid_constant__ ClipArgs args) {
  const std::uint64_t kept = args.training != nullptr ? args.training->h1 : 0;
  args.frame->h1 = kept != 0 ? kept : args.frame->scratch.h1;
  args.state->clipped_gates = args.state->clipped_ups = 0;
}

__global__ void __launch_bounds__(kThreads) count_clipped(const __grid_constant__ ClipArgs args) {
  if (args.frame->failed != 0) return;
  std::int32_t gates = 0;
  std::int32_t ups = 0;
  for_each_pair(
      args.frame->h1, args.frame->num_rows, args.width,
      [&](const PackedColumns<kColumns>& gate, const PackedColumns<kColumns>& up, std::int64_t) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          gates += column_of(gate, c) > args.limit ? 1 : 0;
          ups += fabsf(column_of(up, c)) > args.limit ? 1 : 0;
        }
      });
  gates = __reduce_add_sync(~0u, gates);
  ups = __reduce_add_sync(~0u, ups);
  if (threadIdx.x % 32 != 0) return;
  if (gates != 0) {
    atomicAdd(&args.state->clipped_gates, static_cast<unsigned long long>(gates));
  }
  if (ups != 0) atomicAdd(&args.state->clipped_ups, static_cast<unsigned long long>(ups));
}

__global__ void write_clip(const __grid_constant__ ClipArgs args) {
  if (args.frame->failed != 0) return;
  const auto pairs = std::int64_t{args.frame->num_rows} * args.width;
  const std::int64_t counts[3] = {static_cast<std::int64_t>(args.state->clipped_gates),
                                  static_cast<std::int64_t>(args.state->clipped_ups), pairs};
  for (int i = 0; i < 3; ++i) {
    if (args.counts_are_float != 0) {
      static_cast<float*>(args.counts)[i] = static_cast<float>(counts[i]);
    } else {
      static_cast<std::int64_t*>(args.counts)[i] = counts[i];
    }
  }
}

}  // namespace

cudaError_t prepare_h1_rows() {
  return load_kernels(restore_h2<false>, restore_h2<true>, begin_clip, count_clipped, write_clip);
}

cudaError_t launch_restore_h2(const RestoreH2Args& args, int num_blocks, cudaStream_t stream) {
  if (args.swiglu.is_clamped != 0) {
    restore_h2<true><<<num_blocks, kThreads, 0, stream>>>(args);
  } else {
    restore_h2<false><<<num_blocks, kThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

cudaError_t launch_begin_clip(const ClipArgs& args, cudaStream_t stream) {
  return launch_single(begin_clip, stream, args);
}

cudaError_t launch_count_clipped(const ClipArgs& args, int num_blocks, cudaStream_t stream) {
  count_clipped<<<num_blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_write_clip(const ClipArgs& args, cudaStream_t stream) {
  return launch_single(write_clip, stream, args);
}

}  // namespace distmoe::cuda
