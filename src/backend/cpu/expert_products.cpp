// SPDX-License-Identifier: Apache-2.0
//
// Steps 3b and 4: the products of the experts. A task is one block of rows of one expert times one
// slab of weight rows; the cut depends on the expert's rows and on F and D alone, so that neither
// the number of ranks nor that of threads changes a bit.
#include <algorithm>

#include "backend/cpu/cpu_backend.hpp"
#include "backend/cpu/elementwise.hpp"

namespace distmoe::cpu {
namespace {

constexpr std::int64_t kGateUpColumns = kCpuTileColumns / 2;

/// The bias of some columns of one expert in FP32, or null where there is none.
const float* bias_of(const BiasRows& bias, std::int64_t expert, std::int64_t first,
                     std::int64_t count, float* buffer) {
  if (bias.data == nullptr) return nullptr;
  for (std::int64_t i = 0; i < count; ++i) buffer[i] = bias.at(expert, first + i);
  return buffer;
}

struct RoundedRows {
  BF16* data = nullptr;
  std::int64_t row_stride = 0;
};

/// out(m, n) = bf16(sum_k rows(m, k) * weights(n, k) + bias(n)); a null bias adds nothing.
void project(const MatrixView& rows, const MatrixView& weights, std::int64_t depth,
             const float* bias, const RoundedRows& out, const Workspace& workspace) {
  multiply(rows, weights, depth, workspace.tile, workspace);
  for (std::int64_t row = 0; row < rows.num_rows; ++row) {
    round_with_bias(workspace.tile + row * weights.num_rows, bias, out.data + row * out.row_stride,
                    weights.num_rows);
  }
}

}  // namespace

void CpuBackend::list_tasks(std::int64_t num_columns, std::int64_t columns_per_task) {
  tasks_.clear();
  for (std::int64_t expert = 0; expert < routing_.num_local_experts(); ++expert) {
    const std::int64_t end = routing_.expert_begin(expert + 1);
    for (std::int64_t row = routing_.expert_begin(expert); row < end; row += kCpuRowBlock) {
      for (std::int64_t column = 0; column < num_columns; column += columns_per_task) {
        tasks_.push_back({.expert = expert,
                          .first_row = row,
                          .num_rows = std::min(kCpuRowBlock, end - row),
                          .first_column = column,
                          .num_columns = std::min(columns_per_task, num_columns - column)});
      }
    }
  }
}

void CpuBackend::dispatch_w13_swiglu(const ForwardCall& call) {
  if (!is_single()) {
    exchange_rows(call);
    if (setup_.config.combine == Combine::kPerRank) exchange_scores(call);
  }
  gather_rows(call);
  keep_own_rows(call);
  list_tasks(setup_.config.intermediate_dim, kGateUpColumns);
  pool_.run(static_cast<std::int64_t>(tasks_.size()),
            [&](std::int64_t task, int worker) { w13_swiglu_task(call, task, worker); });
}

void CpuBackend::w13_swiglu_task(const ForwardCall& call, std::int64_t task_idx, int worker) {
  const ProductTask& task = tasks_[static_cast<std::size_t>(task_idx)];
  const Workspace& workspace = workspaces_[static_cast<std::size_t>(worker)];
  const ExpertMatrices& experts = call.experts;
  const std::int64_t intermediate = setup_.config.intermediate_dim;
  const MatrixView rows{x_.row(task.first_row), task.num_rows, x_.width};
  const std::int64_t first_weight =
      task.expert * experts.w13_expert_stride + task.first_column * experts.w13_row_stride;
  BF16* gate = h1_.row(task.first_row) + task.first_column;
  BF16* up = gate + intermediate;

  const auto project_half = [&](const BF16* weights, const BiasRows& bias, BF16* out) {
    project(rows, {weights + first_weight, task.num_columns, experts.w13_row_stride}, x_.width,
            bias_of(bias, task.expert, task.first_column, task.num_columns, workspace.bias),
            {out, h1_.width}, workspace);
  };
  project_half(experts.gate, experts.gate_bias, gate);
  project_half(experts.up, experts.up_bias, up);

  const auto alpha = static_cast<float>(setup_.config.swiglu_alpha);
  const auto limit = static_cast<float>(setup_.config.swiglu_limit);
  for (std::int64_t row = 0; row < task.num_rows; ++row) {
    BF16* h2 = h2_.row(task.first_row + row) + task.first_column;
    const std::int64_t offset = row * h1_.width;
    if (setup_.config.activation == Activation::kSwiGLU) {
      swiglu(gate + offset, up + offset, h2, task.num_columns);
    } else {
      swiglu_clamped(gate + offset, up + offset, h2, task.num_columns, alpha, limit);
    }
  }
}

void CpuBackend::w2_scatter(const ForwardCall& call) {
  list_tasks(setup_.config.hidden_dim, kCpuTileColumns);
  pool_.run(static_cast<std::int64_t>(tasks_.size()),
            [&](std::int64_t task, int worker) { w2_task(call, task, worker); });
  if (!is_single()) {
    if (setup_.config.combine == Combine::kPerRoute) {
      return_rows();
    } else {
      return_partial_sums();
    }
  }
}

void CpuBackend::w2_task(const ForwardCall& call, std::int64_t task_idx, int worker) {
  const ProductTask& task = tasks_[static_cast<std::size_t>(task_idx)];
  const Workspace& workspace = workspaces_[static_cast<std::size_t>(worker)];
  const ExpertMatrices& experts = call.experts;
  const MatrixView rows{h2_.row(task.first_row), task.num_rows, h2_.width};
  const MatrixView slab{experts.w2 + task.expert * experts.w2_expert_stride +
                            task.first_column * experts.w2_row_stride,
                        task.num_columns, experts.w2_row_stride};
  project(rows, slab, h2_.width,
          bias_of(experts.bias2, task.expert, task.first_column, task.num_columns, workspace.bias),
          {h3_.row(task.first_row) + task.first_column, h3_.width}, workspace);
}

}  // namespace distmoe::cpu
