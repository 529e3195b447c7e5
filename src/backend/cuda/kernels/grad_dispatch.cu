// SPDX-License-Identifier: Apache-2.0
//
// publish_grad  rows of dy, scores and, of a layer that is computed again, x into this rank's
//               windows
//
// list_groups   one block: refusals, then the groups of the products from the experts' first rows
//
// form_grad_h3  a block a token: its row of dy is read once, from a peer's window too, and kept in
//               shared memory; a warp takes a route
#include <cub/block/block_scan.cuh>

#include "backend/cuda/kernels/begin_call.cuh"
#include "backend/cuda/kernels/grad_dispatch.hpp"
#include "backend/cuda/kernels/load_kernels.hpp"
#include "backend/cuda/kernels/norm_row.cuh"
#include "backend/cuda/kernels/route_limits.cuh"
#include "backend/cuda/kernels/weighted_row.cuh"
#include "backend/cuda/tile/gemm_storage.hpp"

namespace distmoe::cuda {
namespace {

constexpr int kPublishThreads = 256;
constexpr int kListThreads = 256;
constexpr int kRowThreads = 128;

__device__ void copy_rows(std::uint64_t source, std::int64_t stride_bytes, std::uint64_t window,
                          std::int64_t row_bytes, std::int64_t num_tokens) {
  const std::int64_t per_row = row_bytes / 16;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kPublishThreads + threadIdx.x;
       i < num_tokens * per_row; i += std::int64_t{gridDim.x} * kPublishThreads) {
    const std::int64_t token = i / per_row;
    reinterpret_cast<uint4*>(window)[i] =
        reinterpret_cast<const uint4*>(source + token * stride_bytes)[i - token * per_row];
  }
}

__global__ void publish_grad(const __grid_constant__ PublishGradArgs args) {
  if (args.frame->failed != 0) return;
  copy_rows(args.dy, args.dy_stride_bytes, args.dy_window, args.row_bytes, args.num_tokens);
  if (args.training->kept_x != 0) {
    copy_rows(args.training->kept_x, args.row_bytes, args.x_window, args.row_bytes,
              args.num_tokens);
  }
  const std::int64_t num_routes = std::int64_t{args.num_tokens} * args.top_k;
  for (std::int64_t route = std::int64_t{blockIdx.x} * kPublishThreads + threadIdx.x;
       route < num_routes; route += std::int64_t{gridDim.x} * kPublishThreads) {
    args.score_window[route] = args.scores[route];
  }
}

/// The lowest rank whose host refused its arguments. The same on every rank.
__device__ void check_refusals(const ListGroupsArgs& args) {
  for (int rank = 0; rank < args.num_ranks; ++rank) {
    const PublishedHeader header = *published_header(args.windows[rank].ids);
    if (header.bad_route != kRefusedCall) continue;
    args.frame->failed = 1;
    args.frame->fault = refusal_of(rank, header);
    return;
  }
}

/// Groups and pairs before an expert; both are sums.
struct GroupSums {
  std::int32_t groups;
  std::int32_t pairs;
};
__device__ GroupSums operator+(const GroupSums& a, const GroupSums& b) {
  return {a.groups + b.groups, a.pairs + b.pairs};
}
struct AddGroups {
  __device__ GroupSums operator()(const GroupSums& a, const GroupSums& b) const { return a + b; }
};

__global__ void __launch_bounds__(kListThreads)
    list_groups(const __grid_constant__ ListGroupsArgs args) {
  using Scan = cub::BlockScan<GroupSums, kListThreads>;
  __shared__ Scan::TempStorage storage;
  if (args.frame->failed != 0) return;
  __syncthreads();  // all have read it before one may write it
  if (threadIdx.x == 0) check_refusals(args);
  __syncthreads();
  if (args.frame->failed != 0) return;
  GroupSums before{0, 0};
  for (int begin = 0; begin < args.num_experts; begin += kListThreads) {
    const int expert = begin + static_cast<int>(threadIdx.x);
    const bool is_expert = expert < args.num_experts;
    const std::int32_t first = is_expert ? args.expert_begin[expert] : 0;
    const std::int32_t rows = is_expert ? args.expert_begin[expert + 1] - first : 0;
    const TokenTiling tiling = token_tiling(rows);
    GroupSums place{};
    GroupSums total{};
    Scan(storage).ExclusiveScan(GroupSums{rows > 0 ? 1 : 0, tiling.num_pairs}, place,
                                GroupSums{0, 0}, AddGroups{}, total);
    if (rows > 0) {
      args.groups[before.groups + place.groups] = {expert,
                                                   first,
                                                   rows,
                                                   before.pairs + place.pairs,
                                                   tiling.num_pairs,
                                                   tiling.rows_per_tile,
                                                   args.num_ranks > 1 ? 1 : 0,
                                                   0};
    }
    before = before + total;
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  const GroupCounts all = {before.groups, before.pairs};
  const GroupCounts again = args.training->is_recomputed != 0 ? all : GroupCounts{0, 0};
  args.frame->counts[static_cast<int>(Product::kW13)] = again;
  args.frame->counts[static_cast<int>(Product::kW2)] =
      args.is_normed != 0 && args.num_ranks > 1 ? all : again;
  args.frame->counts[static_cast<int>(Product::kW2Dgrad)] = all;
  args.frame->counts[static_cast<int>(Product::kW13Dgrad)] = all;
}

__device__ uint4 scaled_vector(const uint4& row, float score) {
  float scaled[8] = {};
  scale_columns(unpack(row), score, scaled);
  return vector_of(round_columns(scaled));
}

/// The token that a block handles: one of this rank's own, then those that peers sent.
struct GradToken {
  const std::int32_t* rows;  ///< [K]
  std::uint64_t dy = 0;
  float* scores = nullptr;    ///< [K]; null: a gathered token of which no row is listed
  std::uint64_t kept_h3 = 0;  ///< [K, D] in the slot; 0: h3 lies where grad_h3 will be

  __device__ GradToken(const GradH3Args& args, int index) {
    std::int64_t token = index;
    int source = args.rank;
    if (index < args.num_tokens) {
      rows = args.rows.own + token * args.top_k;
      dy = args.dy + token * args.dy_stride_bytes;
      const std::uint64_t kept = args.training->kept_h3;
      if (kept != 0) kept_h3 = kept + token * args.top_k * args.row_bytes;
    } else {
      rows = args.rows.gathered + std::int64_t{index - args.num_tokens} * args.top_k;
      int k = 0;
      while (k < args.top_k && rows[k] < 0) ++k;
      if (k == args.top_k) return;
      source = args.row_origin[rows[k]].source;
      token = args.row_origin[rows[k]].token;
      dy = args.windows[source].x + args.dy_offset + token * args.row_bytes;
    }
    scores = args.score_offset == 0
                 ? args.scores
                 : reinterpret_cast<float*>(args.windows[source].ids + args.score_offset);
    scores += token * args.top_k;
  }
};

__global__ void __launch_bounds__(kRowThreads)
    form_grad_h3(const __grid_constant__ GradH3Args args) {
  extern __shared__ uint4 dy_row[];
  if (args.frame->failed != 0) return;
  const int num_tokens = args.num_tokens + args.frame->num_gather_rows;
  const bool is_lean = args.is_lean != 0;
  const std::uint64_t grad_h3 = args.frame->scratch.hidden_rows;
  const bool has_h3 = args.training->is_recomputed != 0 && !is_lean;
  const int num_vectors = static_cast<int>(args.row_bytes / 16);
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int index = static_cast<int>(blockIdx.x); index < num_tokens;
       index += static_cast<int>(gridDim.x)) {
    const GradToken token(args, index);
    if (token.scores == nullptr) continue;  // all threads of the block alike
    __syncthreads();                        // the row before is used
    for (int vector = static_cast<int>(threadIdx.x); vector < num_vectors; vector += kRowThreads) {
      dy_row[vector] = __ldcs(reinterpret_cast<const uint4*>(token.dy) + vector);
    }
    __syncthreads();
    for (int k = static_cast<int>(threadIdx.x / 32); k < args.top_k; k += kRowThreads / 32) {
      const std::int64_t row = token.rows[k];
      if (row < 0) continue;
      const float score = token.scores[k];
      auto* out = reinterpret_cast<uint4*>(grad_h3 + row * args.row_bytes);
      if (is_lean) {
        for (int vector = lane; vector < num_vectors; vector += 32) out[vector] = dy_row[vector];
        if (lane == 0) lean_scores(*args.frame).of_rows[row] = score;
        continue;
      }
      if (args.norm.is_given != 0) {
        const auto* h3 = token.kept_h3 != 0
                             ? reinterpret_cast<const uint4*>(token.kept_h3 + k * args.row_bytes)
                             : out;
        const float grad = pull_back_norm(h3, dy_row, score, args.norm.eps, num_vectors, lane, out);
        if (lane == 0) token.scores[k] = grad;
        continue;
      }
      float sum = 0.0f;
      for (int vector = lane; vector < num_vectors; vector += 32) {
        const uint4 dy = dy_row[vector];
        if (has_h3) sum = add_products(sum, out[vector], dy);
        out[vector] = scaled_vector(dy, score);
      }
      if (!has_h3) continue;
      sum = sum_of_lanes(sum);
      if (lane == 0) token.scores[k] = sum;
    }
  }
}

__device__ float bias_of(const DeviceBias& bias, std::int64_t expert, int column) {
  const std::int64_t offset = expert * bias.expert_stride + column * bias.stride;
  return bias.is_bf16 != 0 ? __bfloat162float(static_cast<const __nv_bfloat16*>(bias.data)[offset])
                           : static_cast<const float*>(bias.data)[offset];
}

__device__ int expert_of_row(const LeanScoreArgs& args, int row) {
  int first = 0;
  for (int end = args.num_experts; end - first > 1;) {
    const int middle = (first + end) / 2;
    (args.expert_begin[middle] <= row ? first : end) = middle;
  }
  return first;
}

/// A lane's part of sum_d dy bias2.
__device__ float dot_bias(const LeanScoreArgs& args, const uint4* dy, int row, int lane) {
  const int expert = expert_of_row(args, row);
  float sum = 0.0f;
  for (int vector = lane; vector < args.row_bytes / 16; vector += 32) {
    const PackedColumns<8> columns = unpack(dy[vector]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum = __fadd_rn(
          sum, __fmul_rn(column_of(columns, i), bias_of(args.bias2, expert, vector * 8 + i)));
    }
  }
  return sum;
}

__global__ void __launch_bounds__(kRowThreads)
    finish_lean_scores(const __grid_constant__ LeanScoreArgs args) {
  if (args.frame->failed != 0) return;
  constexpr int kWarps = kRowThreads / 32;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int num_vectors = static_cast<int>(args.row_bytes / 16);
  const LeanScores scores = lean_scores(*args.frame);
  for (int row = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32);
       row < args.frame->num_rows; row += static_cast<int>(gridDim.x * kWarps)) {
    auto* dy = reinterpret_cast<uint4*>(args.frame->scratch.hidden_rows +
                                        std::int64_t{row} * args.row_bytes);
    float sum = 0.0f;
    for (int part = lane; part < args.num_score_parts; part += 32) {
      sum = __fadd_rn(sum, scores.parts[std::int64_t{row} * args.num_score_parts + part]);
    }
    sum = sum_of_lanes(sum);
    if (args.bias2.data != nullptr) {
      sum = __fadd_rn(sum, sum_of_lanes(dot_bias(args, dy, row, lane)));
    }
    const float score = scores.of_rows[row];
    for (int vector = lane; vector < num_vectors; vector += 32) {
      dy[vector] = scaled_vector(dy[vector], score);
    }
    if (lane != 0) continue;
    const RowOrigin origin = args.row_origin[row];
    if (!is_within(args.limits, origin)) continue;
    float* grads =
        args.score_offset == 0
            ? args.scores
            : reinterpret_cast<float*>(args.windows[origin.source].ids + args.score_offset);
    grads[std::int64_t{origin.token} * args.top_k + origin.k] = sum;
  }
}

}  // namespace

cudaError_t prepare_grad_dispatch() {
  if (const cudaError_t error = cudaFuncSetAttribute(
          form_grad_h3, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes)) {
    return error;
  }
  return load_kernels(publish_grad, list_groups, form_grad_h3, finish_lean_scores);
}

bool fits_grad_dispatch(std::int64_t row_bytes) { return row_bytes <= kMaxSharedBytes; }

cudaError_t launch_publish_grad(const PublishGradArgs& args, int num_blocks, cudaStream_t stream) {
  if (args.num_tokens == 0) return cudaSuccess;
  publish_grad<<<num_blocks, kPublishThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_list_groups(const ListGroupsArgs& args, cudaStream_t stream) {
  list_groups<<<1, kListThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_grad_h3(const GradH3Args& args, int num_blocks, cudaStream_t stream) {
  form_grad_h3<<<num_blocks, kRowThreads, static_cast<std::size_t>(args.row_bytes), stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_lean_scores(const LeanScoreArgs& args, int num_blocks, cudaStream_t stream) {
  finish_lean_scores<<<num_blocks, kRowThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace distmoe::cuda
