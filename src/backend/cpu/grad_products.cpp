// SPDX-License-Identifier: Apache-2.0
//
// The products of a backward. DGRAD is cut like the forward's products, into blocks of rows of one
// expert by slabs of columns; WGRAD into tiles of one expert's matrix, each of which sums over all
// rows of the expert. Both cuts depend on the expert's rows and on F and D alone.
#include <algorithm>
#include <array>

#include "backend/cpu/cpu_backend.hpp"
#include "backend/cpu/elementwise.hpp"
#include "backend/cpu/grad_matmul.hpp"
#include "backend/cpu/streamed_store.hpp"

namespace distmoe::cpu {
namespace {

/// Rows of a weight in one tile: its FP32 sums stay in the second-level cache until they are
/// stored.
constexpr std::int64_t kWgradRows = 256;
static_assert(kWgradRows <= kCpuRowBlock);

/// Rows of a tile of FP32 sums, rounded to rows of BF16.
void round_tile(const float* tile, std::int64_t num_rows, std::int64_t num_columns, BF16* out,
                std::int64_t row_stride) {
  for (std::int64_t row = 0; row < num_rows; ++row) {
    round_with_bias(tile + row * num_columns, nullptr, out + row * row_stride, num_columns);
  }
}

/// At most kCpuTileColumns elements of a gradient that lie together: `sums`, or zeros where it is
/// null.
// NOTE: the weights' gradients are as large as the weights and nothing here reads them again.
// Streamed, they need not be read before they are written: 201 MB of sums are rounded and stored in
// 16 instead of 32 ms (BF16, one core of Zen 4).
void store_gradient(const GradientDestination& out, std::int64_t first, std::int64_t count,
                    const float* sums) {
  static constexpr std::array<float, kCpuTileColumns> kZeros{};
  const bool is_float = out.dtype == DType::kF32;
  auto* as_float = static_cast<float*>(out.data) + first;
  auto* as_bf16 = static_cast<BF16*>(out.data) + first;
  const auto size = static_cast<std::size_t>(count);
  if (out.accumulates) {
    if (sums == nullptr) return;
    is_float ? add(sums, as_float, count) : add_rounded(sums, as_bf16, count);
  } else if (is_float) {
    store_streamed(sums != nullptr ? sums : kZeros.data(), as_float, size * sizeof(float));
  } else {
    std::array<BF16, kCpuTileColumns> rounded{};
    round_with_bias(sums != nullptr ? sums : kZeros.data(), nullptr, rounded.data(), count);
    store_streamed(rounded.data(), as_bf16, size * sizeof(BF16));
  }
}

}  // namespace

// ---- DGRAD

void CpuBackend::w2_dgrad(const BackwardCall& call) {
  if (setup_.config.activation_policy == ActivationPolicy::kLean) {
    // A task has all columns of its rows: the scores' gradients sum over them.
    list_tasks(1, 1);
    pool_.run(static_cast<std::int64_t>(tasks_.size()),
              [&](std::int64_t task, int worker) { lean_w2_dgrad_task(call, task, worker); });
    return;
  }
  list_tasks(setup_.config.intermediate_dim, kCpuPackedColumns);
  pool_.run(static_cast<std::int64_t>(tasks_.size()),
            [&](std::int64_t task, int worker) { w2_dgrad_task(call, task, worker); });
}

/// Columns of W2, as an operand of depth D.
DepthRows CpuBackend::w2_columns(const BackwardCall& call, std::int64_t expert, std::int64_t first,
                                 std::int64_t count) const {
  const ExpertMatrices& experts = call.experts;
  return {.first = experts.w2 + expert * experts.w2_expert_stride + first,
          .num_rows = setup_.config.hidden_dim,
          .num_columns = count,
          .row_stride = experts.w2_row_stride};
}

void CpuBackend::w2_dgrad_task(const BackwardCall& call, std::int64_t task_idx, int worker) {
  const ProductTask& task = tasks_[static_cast<std::size_t>(task_idx)];
  const Workspace& workspace = workspaces_[static_cast<std::size_t>(worker)];
  multiply_dgrad({grad_h3_.row(task.first_row), task.num_rows, grad_h3_.width},
                 w2_columns(call, task.expert, task.first_column, task.num_columns), workspace.tile,
                 workspace);
  round_tile(workspace.tile, task.num_rows, task.num_columns,
             grad_h2_.row(task.first_row) + task.first_column, grad_h2_.width);
}

/// a = W2^T dy; grad_score = sum_f a * h2 + sum_d dy * bias2, slab by slab; grad_h2 = bf16(a *
/// score); then dy becomes grad_h3.
void CpuBackend::lean_w2_dgrad_task(const BackwardCall& call, std::int64_t task_idx, int worker) {
  const ProductTask& task = tasks_[static_cast<std::size_t>(task_idx)];
  const Workspace& workspace = workspaces_[static_cast<std::size_t>(worker)];
  const std::int64_t end = task.first_row + task.num_rows;
  std::vector<float> score_gradients(static_cast<std::size_t>(task.num_rows));
  for (std::int64_t column = 0; column < grad_h2_.width; column += kCpuPackedColumns) {
    const std::int64_t count = std::min(kCpuPackedColumns, grad_h2_.width - column);
    multiply_dgrad({grad_h3_.row(task.first_row), task.num_rows, grad_h3_.width},
                   w2_columns(call, task.expert, column, count), workspace.tile, workspace);
    for (std::int64_t row = task.first_row; row < end; ++row) {
      const float* a = workspace.tile + (row - task.first_row) * count;
      score_gradients[static_cast<std::size_t>(row - task.first_row)] +=
          dot(a, h2_.row(row) + column, count);
      scale(a, route_score(task.expert, row), grad_h2_.row(row) + column, count);
    }
  }
  const BiasRows& bias = call.experts.bias2;
  for (std::int64_t column = 0; bias.data != nullptr && column < grad_h3_.width;
       column += kCpuTileColumns) {
    const std::int64_t count = std::min(kCpuTileColumns, grad_h3_.width - column);
    for (std::int64_t i = 0; i < count; ++i) {
      workspace.bias[i] = bias.at(task.expert, column + i);
    }
    for (std::int64_t row = task.first_row; row < end; ++row) {
      score_gradients[static_cast<std::size_t>(row - task.first_row)] +=
          dot(workspace.bias, grad_h3_.row(row) + column, count);
    }
  }
  for (std::int64_t row = task.first_row; row < end; ++row) {
    float& score = route_score(task.expert, row);
    scale(grad_h3_.row(row), score, grad_h3_.row(row), grad_h3_.width);
    score = score_gradients[static_cast<std::size_t>(row - task.first_row)];
  }
}

void CpuBackend::w13_dgrad_scatter(const BackwardCall& call) {
  list_tasks(setup_.config.hidden_dim, kCpuPackedColumns);
  pool_.run(static_cast<std::int64_t>(tasks_.size()),
            [&](std::int64_t task, int worker) { w13_dgrad_task(call, task, worker); });
  if (!is_single()) return_route_rows(route_grad_);
}

/// Gate and up rows are one operand of depth 2F, gate first, whatever the layout of W13.
void CpuBackend::w13_dgrad_task(const BackwardCall& call, std::int64_t task_idx, int worker) {
  const ProductTask& task = tasks_[static_cast<std::size_t>(task_idx)];
  const Workspace& workspace = workspaces_[static_cast<std::size_t>(worker)];
  const ExpertMatrices& experts = call.experts;
  const std::int64_t offset = task.expert * experts.w13_expert_stride + task.first_column;
  multiply_dgrad({grad_h1_.row(task.first_row), task.num_rows, grad_h1_.width},
                 {.first = experts.gate + offset,
                  .second = experts.up + offset,
                  .num_rows = setup_.config.intermediate_dim,
                  .num_columns = task.num_columns,
                  .row_stride = experts.w13_row_stride},
                 workspace.tile, workspace);
  round_tile(workspace.tile, task.num_rows, task.num_columns,
             route_grad_.row(task.first_row) + task.first_column, route_grad_.width);
}

// ---- WGRAD

/// One tile of one expert's matrix: columns of the gradient rows by columns of the activations.
struct CpuBackend::WgradTile {
  std::int64_t expert = 0;
  std::int64_t first_row = 0;  ///< of the weight, in its half
  std::int64_t num_rows = 0;
  std::int64_t half = 0;  ///< of W13: 0 the gate, 1 the up rows
  std::int64_t first_column = 0;
  std::int64_t num_columns = 0;
};

/// Tiles of matrices [L][num_halves * num_rows, num_columns], expert by expert.
std::vector<CpuBackend::WgradTile> CpuBackend::wgrad_tiles(std::int64_t num_halves,
                                                           std::int64_t num_rows,
                                                           std::int64_t num_columns) const {
  std::vector<WgradTile> tiles;
  for (std::int64_t expert = 0; expert < routing_.num_local_experts(); ++expert) {
    for (std::int64_t half = 0; half < num_halves; ++half) {
      for (std::int64_t row = 0; row < num_rows; row += kWgradRows) {
        for (std::int64_t column = 0; column < num_columns; column += kCpuTileColumns) {
          tiles.push_back({.expert = expert,
                           .first_row = row,
                           .num_rows = std::min(kWgradRows, num_rows - row),
                           .half = half,
                           .first_column = column,
                           .num_columns = std::min(kCpuTileColumns, num_columns - column)});
        }
      }
    }
  }
  return tiles;
}

/// grads[rows of the expert, num_rows]^T times activations[rows of the expert, num_columns].
/// `row_in_weight` says which row of the weight is row i of the tile's half.
template <typename RowInWeight>
void CpuBackend::wgrad_tile(const WgradTile& tile, const DenseRows& grads,
                            const DenseRows& activations, const GradientDestination& out,
                            const RowInWeight& row_in_weight, int worker) {
  const Workspace& workspace = workspaces_[static_cast<std::size_t>(worker)];
  const std::int64_t begin = routing_.expert_begin(tile.expert);
  const std::int64_t num_rows = routing_.expert_begin(tile.expert + 1) - begin;
  if (num_rows > 0) {
    const std::int64_t column = tile.half * setup_.config.intermediate_dim + tile.first_row;
    multiply_wgrad(
        {grads.row(begin) + column, tile.num_rows, grads.width},
        {activations.row(begin) + tile.first_column, tile.num_columns, activations.width}, num_rows,
        workspace.tile, workspace);
  }
  for (std::int64_t row = 0; row < tile.num_rows; ++row) {
    const std::int64_t first =
        row_in_weight(tile.first_row + row) * activations.width + tile.first_column;
    store_gradient(out, first, tile.num_columns,
                   num_rows > 0 ? workspace.tile + row * tile.num_columns : nullptr);
  }
  finish_streamed_stores();
}

/// out[expert, position_of(column)] = the sum of the expert's rows, one after the other.
template <typename PositionOf>
void CpuBackend::sum_expert_rows(const DenseRows& grads, const GradientDestination& out,
                                 const PositionOf& position_of) {
  if (out.data == nullptr) return;
  const std::int64_t slabs = ceil_div(grads.width, kCpuTileColumns);
  pool_.run(routing_.num_local_experts() * slabs, [&](std::int64_t task, int worker) {
    float* sums = workspaces_[static_cast<std::size_t>(worker)].bias;
    const std::int64_t expert = task / slabs;
    const std::int64_t column = task % slabs * kCpuTileColumns;
    const std::int64_t count = std::min(kCpuTileColumns, grads.width - column);
    const std::int64_t begin = routing_.expert_begin(expert);
    const std::int64_t end = routing_.expert_begin(expert + 1);
    std::fill_n(sums, count, 0.0f);
    for (std::int64_t row = begin; row < end; ++row) {
      add_scaled(grads.row(row) + column, 1.0f, sums, count);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      store_gradient(out, expert * grads.width + position_of(column + i), 1,
                     begin < end ? sums + i : nullptr);
    }
  });
}

void CpuBackend::w2_wgrad(const BackwardCall& call) {
  const std::int64_t num_rows = setup_.config.hidden_dim;
  if (call.grad_w2_LDF.data != nullptr) {
    const std::vector<WgradTile> tiles = wgrad_tiles(1, num_rows, h2_.width);
    pool_.run(std::ssize(tiles), [&](std::int64_t index, int worker) {
      const WgradTile& tile = tiles[static_cast<std::size_t>(index)];
      wgrad_tile(
          tile, grad_h3_, h2_, call.grad_w2_LDF,
          [&](std::int64_t row) { return tile.expert * num_rows + row; }, worker);
    });
  }
  sum_expert_rows(grad_h3_, call.grad_bias2_LD, [](std::int64_t column) { return column; });
}

void CpuBackend::w13_wgrad(const BackwardCall& call) {
  const std::int64_t width = setup_.config.intermediate_dim;
  const bool is_interleaved = setup_.config.gate_up_layout == GateUpLayout::kInterleaved;
  // Row `row` of a half, within the 2F of the weight.
  const auto position_of = [&](std::int64_t half, std::int64_t row) {
    return is_interleaved ? 2 * row + half : half * width + row;
  };
  if (call.grad_w13_L2FD.data != nullptr) {
    const std::vector<WgradTile> tiles = wgrad_tiles(2, width, x_.width);
    pool_.run(std::ssize(tiles), [&](std::int64_t index, int worker) {
      const WgradTile& tile = tiles[static_cast<std::size_t>(index)];
      wgrad_tile(
          tile, grad_h1_, x_, call.grad_w13_L2FD,
          [&](std::int64_t row) { return tile.expert * 2 * width + position_of(tile.half, row); },
          worker);
    });
  }
  sum_expert_rows(grad_h1_, call.grad_bias13_L2F,
                  [&](std::int64_t column) { return position_of(column / width, column % width); });
}

}  // namespace distmoe::cpu
