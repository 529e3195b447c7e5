// SPDX-License-Identifier: Apache-2.0
//
// The products of a backward. DGRAD is cut like the forward's products, into blocks of rows of one
// expert by slabs of columns; WGRAD into tiles of one expert's matrix, each of which sums over all
// rows of the expert. Both cuts depend on the expert's rows and on F and D alone.
#include <algorithm>
#include <array>

#include "backend/cpu/cpu_backend.hpp"
#include "backend/cpu/elementwise.hpp"
#include "backend/cpu/few_row_products.hpp"
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

void CpuBackend::w2_dgrad_task(const BackwardCall& call, std::int64_t task_idx, int worker) {
  const ProductTask& task = tasks_[static_cast<std::size_t>(task_idx)];
  const Workspace& workspace = workspaces_[static_cast<std::size_t>(worker)];
  const RowOperand grad_h3 = has_codes() ? RowOperand(coded_grad_h3_) : RowOperand(grad_h3_);
  const WeightOperands weights(setup_.config, call.experts);
  multiply_dgrad(grad_h3.rows(task.first_row, task.num_rows, workspace),
                 weights.w2_columns(task.expert, task.first_column, task.num_columns, workspace),
                 workspace.tile, workspace);
  round_tile(workspace.tile, task.num_rows, task.num_columns,
             grad_h2_.row(task.first_row) + task.first_column, grad_h2_.width);
}

/// a = W2^T dy; grad_score = sum_f a * h2 + sum_d dy * bias2, slab by slab; grad_h2 = bf16(a *
/// score); then dy becomes grad_h3.
void CpuBackend::lean_w2_dgrad_task(const BackwardCall& call, std::int64_t task_idx, int worker) {
  const ProductTask& task = tasks_[static_cast<std::size_t>(task_idx)];
  const Workspace& workspace = workspaces_[static_cast<std::size_t>(worker)];
  const std::int64_t end = task.first_row + task.num_rows;
  const WeightOperands weights(setup_.config, call.experts);
  std::vector<float> score_gradients(static_cast<std::size_t>(task.num_rows));
  for (std::int64_t column = 0; column < grad_h2_.width; column += kCpuPackedColumns) {
    const std::int64_t count = std::min(kCpuPackedColumns, grad_h2_.width - column);
    multiply_dgrad({grad_h3_.row(task.first_row), task.num_rows, grad_h3_.width},
                   weights.w2_columns(task.expert, column, count, workspace), workspace.tile,
                   workspace);
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

void CpuBackend::w13_dgrad_task(const BackwardCall& call, std::int64_t task_idx, int worker) {
  const ProductTask& task = tasks_[static_cast<std::size_t>(task_idx)];
  const Workspace& workspace = workspaces_[static_cast<std::size_t>(worker)];
  const RowOperand grad_h1 = has_codes() ? RowOperand(coded_grad_h1_) : RowOperand(grad_h1_);
  const WeightOperands weights(setup_.config, call.experts);
  multiply_dgrad(grad_h1.rows(task.first_row, task.num_rows, workspace),
                 weights.w13_columns(task.expert, task.first_column, task.num_columns, workspace),
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

/// grads[rows of the expert, num_rows]^T times activations[rows of the expert, num_columns], at
/// least one row, into the workspace's tile. Codes are decoded a block of rows at a time, counted
/// from the expert's first, and their sums added up.
void CpuBackend::wgrad_sums(const WgradTile& tile, const WgradOperands& operands,
                            const RowRange& rows, const Workspace& workspace) const {
  const std::int64_t column = tile.half * setup_.config.intermediate_dim + tile.first_row;
  const std::int64_t block = operands.grads.is_coded() ? kCpuRowBlock : rows.size();
  for (std::int64_t begin = rows.begin; begin < rows.end; begin += block) {
    const RowRange part{rows.expert, begin, std::min(begin + block, rows.end)};
    multiply_wgrad(operands.grads.slab(part, column, tile.num_rows, workspace.decoded_weights),
                   operands.activations.slab(part, tile.first_column, tile.num_columns,
                                             workspace.decoded_rows),
                   part.size(), workspace.tile, begin > rows.begin, workspace);
  }
}

/// A tile of an expert of few rows, strip by strip. `first_of` says where row i of the tile begins.
template <typename FirstOf>
void CpuBackend::store_few_rows_wgrad(const FewRowsWgrad& product, const WgradTile& tile,
                                      const GradientDestination& out, const FirstOf& first_of,
                                      const Workspace& workspace) {
  const bool is_rounded = out.dtype == DType::kBF16 && !out.accumulates;
  auto* rounded = reinterpret_cast<BF16*>(workspace.tile);
  for (std::int64_t row = 0; row < tile.num_rows; row += FewRowsWgrad::kStripRows) {
    is_rounded ? product.multiply(row, rounded) : product.multiply(row, workspace.tile);
    const std::int64_t count = std::min(FewRowsWgrad::kStripRows, tile.num_rows - row);
    for (std::int64_t i = 0; i < count; ++i) {
      if (is_rounded) {
        store_streamed(rounded + i * product.width(),
                       static_cast<BF16*>(out.data) + first_of(row + i),
                       static_cast<std::size_t>(tile.num_columns) * sizeof(BF16));
      } else {
        store_gradient(out, first_of(row + i), tile.num_columns,
                       workspace.tile + i * product.width());
      }
    }
  }
}

/// `row_in_weight` says which row of the weight is row i of the tile's half.
template <typename RowInWeight>
void CpuBackend::wgrad_tile(const WgradTile& tile, const WgradOperands& operands,
                            const GradientDestination& out, const RowInWeight& row_in_weight,
                            int worker) {
  const Workspace& workspace = workspaces_[static_cast<std::size_t>(worker)];
  const RowRange rows = rows_of_expert(tile.expert);
  const auto first_of = [&](std::int64_t row) {
    return row_in_weight(tile.first_row + row) * operands.num_columns + tile.first_column;
  };
  if (rows.size() > 0 && rows.size() <= kFewRows && !operands.grads.is_coded() &&
      has_few_row_products()) {
    const std::int64_t column = tile.half * setup_.config.intermediate_dim + tile.first_row;
    const FewRowsWgrad product(
        operands.grads.slab(rows, column, tile.num_rows, workspace.decoded_weights),
        operands.activations.slab(rows, tile.first_column, tile.num_columns,
                                  workspace.decoded_rows),
        rows.size(), workspace);
    store_few_rows_wgrad(product, tile, out, first_of, workspace);
  } else {
    if (rows.size() > 0) wgrad_sums(tile, operands, rows, workspace);
    for (std::int64_t row = 0; row < tile.num_rows; ++row) {
      store_gradient(out, first_of(row), tile.num_columns,
                     rows.size() > 0 ? workspace.tile + row * tile.num_columns : nullptr);
    }
  }
  finish_streamed_stores();
}

/// out[expert] = the sum of the expert's rows, one after the other; interleaved: one element of
/// each half after the other.
void CpuBackend::sum_expert_rows(const DenseRows& grads, bool is_interleaved,
                                 const GradientDestination& out) {
  if (out.data == nullptr) return;
  const std::int64_t halves = is_interleaved ? 2 : 1;
  const std::int64_t width = grads.width / halves;
  const std::int64_t step = kCpuTileColumns / halves;
  const std::int64_t slabs = ceil_div(width, step);
  pool_.run(routing_.num_local_experts() * slabs, [&](std::int64_t task, int worker) {
    const Workspace& workspace = workspaces_[static_cast<std::size_t>(worker)];
    const std::int64_t expert = task / slabs;
    const std::int64_t column = task % slabs * step;
    const std::int64_t count = std::min(step, width - column);
    const RowRange rows = rows_of_expert(expert);
    float* sums = workspace.bias;
    for (std::int64_t half = 0; half < halves; ++half) {
      std::fill_n(sums, count, 0.0f);
      for (std::int64_t row = rows.begin; row < rows.end; ++row) {
        add_scaled(grads.row(row) + half * width + column, 1.0f, sums, count);
      }
      for (std::int64_t i = 0; i < count; ++i) workspace.tile[i * halves + half] = sums[i];
    }
    store_gradient(out, expert * grads.width + column * halves, count * halves,
                   rows.size() > 0 ? workspace.tile : nullptr);
    finish_streamed_stores();
  });
}

void CpuBackend::w2_wgrad(const BackwardCall& call) {
  const std::int64_t num_rows = setup_.config.hidden_dim;
  if (call.grad_w2_LDF.data != nullptr) {
    const std::vector<WgradTile> tiles = wgrad_tiles(1, num_rows, h2_.width);
    const WgradOperands operands{
        .grads = has_codes() ? DepthOperand(grad_h3_columns_) : DepthOperand(grad_h3_),
        .activations = has_codes() ? DepthOperand(h2_columns_) : DepthOperand(h2_),
        .num_columns = h2_.width};
    pool_.run(std::ssize(tiles), [&](std::int64_t index, int worker) {
      const WgradTile& tile = tiles[static_cast<std::size_t>(index)];
      wgrad_tile(
          tile, operands, call.grad_w2_LDF,
          [&](std::int64_t row) { return tile.expert * num_rows + row; }, worker);
    });
  }
  sum_expert_rows(grad_h3_, false, call.grad_bias2_LD);
}

void CpuBackend::w13_wgrad(const BackwardCall& call) {
  const std::int64_t width = setup_.config.intermediate_dim;
  const bool is_interleaved = setup_.config.gate_up_layout == GateUpLayout::kInterleaved;
  // Row `row` of a half, within the 2F of the weight.
  const auto position_of = [&](std::int64_t half, std::int64_t row) {
    return is_interleaved ? 2 * row + half : half * width + row;
  };
  if (call.grad_w13_L2FD.data != nullptr) {
    const std::int64_t num_columns = setup_.config.hidden_dim;
    const std::vector<WgradTile> tiles = wgrad_tiles(2, width, num_columns);
    const WgradOperands operands{
        .grads = has_codes() ? DepthOperand(grad_h1_columns_) : DepthOperand(grad_h1_),
        .activations = has_codes() ? DepthOperand(x_columns_) : DepthOperand(x_),
        .num_columns = num_columns};
    pool_.run(std::ssize(tiles), [&](std::int64_t index, int worker) {
      const WgradTile& tile = tiles[static_cast<std::size_t>(index)];
      wgrad_tile(
          tile, operands, call.grad_w13_L2FD,
          [&](std::int64_t row) { return tile.expert * 2 * width + position_of(tile.half, row); },
          worker);
    });
  }
  sum_expert_rows(grad_h1_, is_interleaved, call.grad_bias13_L2F);
}

}  // namespace distmoe::cpu
