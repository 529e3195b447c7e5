// SPDX-License-Identifier: Apache-2.0
//
// list_rows    a thread a row
// spread_x     a block a token: its row is read once and written to every row that it has here
// keep_inputs  a thread a route
// keep_h3      a warp a route
#include "backend/cuda/kernels/training_rows.hpp"

#include "backend/cuda/kernels/load_kernels.hpp"
#include "backend/cuda/kernels/route_limits.cuh"
#include "backend/cuda/kernels/score.cuh"

namespace distmoe::cuda {
namespace {

constexpr int kThreads = 256;

/// NOTE: no cudaMemsetAsync, whose kernel CUDA may load at its first launch, see load_kernels.hpp.
__global__ void clear_rows(const __grid_constant__ ListRowsArgs args) {
  const auto count = static_cast<std::int64_t>(args.rows.bytes / sizeof(std::int32_t));
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * kThreads) {
    args.rows.own[i] = -1;
  }
}

__global__ void list_rows(const __grid_constant__ ListRowsArgs args) {
  if (args.frame->failed != 0) return;
  const int num_rows = args.frame->num_rows;
  const bool places = args.token_row_address != nullptr && args.training->is_recomputed != 0;
  const std::uint64_t kept_h3 = args.is_backward == 0 ? args.training->kept_h3 : 0;
  const std::uint64_t results = kept_h3 != 0 ? kept_h3 : args.results;
  for (int row = static_cast<int>(blockIdx.x * kThreads + threadIdx.x); row < num_rows;
       row += static_cast<int>(gridDim.x * kThreads)) {
    const RowOrigin origin = args.row_origin[row];
    const std::int64_t gathered = args.gather_index[row];
    const std::int64_t token = origin.token;
    const bool is_own = origin.source == args.rank;
    if (!is_within(args.limits, origin)) continue;
    if (!is_own && (gathered < 0 || gathered >= args.limits.gather_rows)) continue;
    if (is_own) {
      args.rows.own[token * args.top_k + origin.k] = row;
    } else {
      args.rows.gathered[gathered * args.top_k + origin.k] = row;
      atomicMax(&args.frame->num_gather_rows, static_cast<std::int32_t>(gathered) + 1);
    }
    if (args.result_row_address != nullptr) {
      const std::uint64_t owner =
          args.windows != nullptr ? args.windows[origin.source].combine : results;
      args.result_row_address[row] = owner + (token * args.top_k + origin.k) * args.row_bytes;
    }
    if (!places) continue;
    args.token_row_address[row] =
        is_own ? args.training->kept_x + token * args.row_bytes
               : args.frame->scratch.hidden_rows + gathered * args.row_bytes;
  }
}

/// One token's row to all rows of `x` that are listed.
__device__ void spread_row(std::uint64_t source, const std::int32_t* rows, int top_k,
                           std::uint64_t x, std::int64_t row_bytes) {
  const auto* from = reinterpret_cast<const uint4*>(source);
  for (int vector = static_cast<int>(threadIdx.x); vector < row_bytes / 16; vector += kThreads) {
    const uint4 value = __ldcg(&from[vector]);
    for (int k = 0; k < top_k; ++k) {
      const std::int64_t row = rows[k];
      if (row >= 0) reinterpret_cast<uint4*>(x + row * row_bytes)[vector] = value;
    }
  }
}

__global__ void spread_x(const __grid_constant__ SpreadXArgs args) {
  if (args.frame->failed != 0) return;
  const TrainingFrame& training = *args.training;
  const bool is_forward = args.is_backward == 0;
  if (!is_forward && training.kept_x == 0) return;
  const bool is_pulled = !is_forward && training.is_recomputed == 0;
  const int num_tokens = args.num_tokens;
  const int num_gathered = training.x != 0 ? args.frame->num_gather_rows : 0;
  const std::uint64_t gather_buffer = args.frame->scratch.hidden_rows;
  for (int i = static_cast<int>(blockIdx.x); i < num_tokens + num_gathered;
       i += static_cast<int>(gridDim.x)) {
    if (i >= num_tokens) {
      const std::int64_t gathered = i - num_tokens;
      spread_row(
          is_pulled ? args.gather_source[gathered] : gather_buffer + gathered * args.row_bytes,
          args.rows.gathered + gathered * args.top_k, args.top_k, training.x, args.row_bytes);
      continue;
    }
    const std::int64_t token = i;
    const std::uint64_t source = is_forward ? args.x + token * args.x_stride_bytes
                                            : training.kept_x + token * args.row_bytes;
    if (training.x != 0) {
      spread_row(source, args.rows.own + token * args.top_k, args.top_k, training.x,
                 args.row_bytes);
    } else {
      constexpr std::int32_t kFirst = 0;
      spread_row(source, &kFirst, 1, training.kept_x + token * args.row_bytes, args.row_bytes);
    }
  }
}

__global__ void keep_inputs(const __grid_constant__ KeepInputsArgs args) {
  if (args.frame->failed != 0) return;
  const std::int64_t num_routes = std::int64_t{args.num_tokens} * args.top_k;
  for (std::int64_t route = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; route < num_routes;
       route += std::int64_t{gridDim.x} * kThreads) {
    args.kept_ids[route] = args.ids[route];
    args.kept_scores[route] = load_score(args, route / args.top_k, route % args.top_k);
  }
}

__global__ void keep_h3(const __grid_constant__ KeepH3Args args) {
  const std::uint64_t kept = args.training->kept_h3;
  if (args.frame->failed != 0 || kept == 0) return;
  constexpr int kWarps = kThreads / 32;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int num_vectors = static_cast<int>(args.row_bytes / 16);
  for (std::int64_t route = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
       route < args.num_routes; route += std::int64_t{gridDim.x} * kWarps) {
    if (args.ids[route] < 0) continue;
    const auto* from = reinterpret_cast<const uint4*>(args.results + route * args.row_bytes);
    auto* to = reinterpret_cast<uint4*>(kept + route * args.row_bytes);
    for (int vector = lane; vector < num_vectors; vector += 32) to[vector] = __ldcs(&from[vector]);
  }
}

}  // namespace

cudaError_t prepare_training_rows() {
  return load_kernels(clear_rows, list_rows, spread_x, keep_inputs, keep_h3);
}

cudaError_t launch_list_rows(const ListRowsArgs& args, int num_blocks, cudaStream_t stream) {
  clear_rows<<<num_blocks, kThreads, 0, stream>>>(args);
  list_rows<<<num_blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_spread_x(const SpreadXArgs& args, int num_blocks, cudaStream_t stream) {
  spread_x<<<num_blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_keep_inputs(const KeepInputsArgs& args, int num_blocks, cudaStream_t stream) {
  if (args.num_tokens == 0) return cudaSuccess;
  keep_inputs<<<num_blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_keep_h3(const KeepH3Args& args, int num_blocks, cudaStream_t stream) {
  if (args.num_routes == 0) return cudaSuccess;
  keep_h3<<<num_blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace distmoe::cuda
