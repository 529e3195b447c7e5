// SPDX-License-Identifier: Apache-2.0
//
// Steps 3b and 4: the products of the experts. A task is one block of rows of one expert times one
// slab of weight rows; the cut depends on the expert's rows and on F and D alone, so that neither
// the number of ranks nor that of threads changes a bit.
#include <algorithm>
#include <array>
#include <utility>

#include "backend/cpu/cpu_backend.hpp"
#include "backend/cpu/elementwise.hpp"

namespace distmoe::cpu {
namespace {

constexpr std::int64_t kGateUpColumns = kCpuTileColumns / 2;
constexpr std::int64_t kDownColumns = 256;
static_assert(kDownColumns <= kCpuTileColumns);

/// The bias of some columns of one expert in FP32, or null where there is none.
const float* bias_of(const BiasRows& bias, std::int64_t expert, std::int64_t first,
                     std::int64_t count, float* buffer) {
  if (bias.data == nullptr) return nullptr;
  for (std::int64_t i = 0; i < count; ++i) buffer[i] = bias.at(expert, first + i);
  return buffer;
}

}  // namespace

void CpuBackend::list_tasks(std::int64_t num_columns, std::int64_t columns_per_task) {
  tasks_.clear();
  for (std::int64_t expert = 0; expert < routing_.num_local_experts(); ++expert) {
    const std::int64_t end = routing_.expert_end(expert);
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

void CpuBackend::run_rows(std::int64_t grain,
                          const std::function<void(const RowRange& rows, int worker)>& body) {
  row_ranges_.clear();
  for (std::int64_t expert = 0; expert < routing_.num_local_experts(); ++expert) {
    const RowRange all = rows_of_expert(expert);
    for (std::int64_t row = all.begin; row < all.end; row += grain) {
      row_ranges_.push_back({expert, row, std::min(row + grain, all.end)});
    }
  }
  pool_.run(std::ssize(row_ranges_), [&](std::int64_t index, int worker) {
    body(row_ranges_[static_cast<std::size_t>(index)], worker);
  });
}

void CpuBackend::dispatch_w13_swiglu(const ForwardCall& call) {
  if (!is_single()) {
    exchange_rows(call.x_TD, sends_codes());
    if (setup_.config.combine == Combine::kPerRank) exchange_scores(call);
  }
  gather_rows(call.x_TD);
  keep_own_rows(call);
  clip_limit_ = call.clip_counts_3.is_given() ? std::optional(call.clip_limit) : std::nullopt;
  gates_clipped_ = ups_clipped_ = 0;
  compute_w13_swiglu(call.experts);
  clip_limit_.reset();
}

void CpuBackend::compute_w13_swiglu(const ExpertMatrices& experts) {
  list_tasks(setup_.config.intermediate_dim, kGateUpColumns);
  pool_.run(static_cast<std::int64_t>(tasks_.size()),
            [&](std::int64_t task, int worker) { w13_swiglu_task(experts, task, worker); });
}

void CpuBackend::w13_swiglu_task(const ExpertMatrices& experts, std::int64_t task_idx, int worker) {
  const ProductTask& task = tasks_[static_cast<std::size_t>(task_idx)];
  const Workspace& workspace = workspaces_[static_cast<std::size_t>(worker)];
  const Config& config = setup_.config;
  const std::int64_t num_columns = task.num_columns;
  const RowOperand x = has_codes() ? RowOperand(coded_x_) : RowOperand(x_);
  const MatrixView rows = x.rows(task.first_row, task.num_rows, workspace);
  const WeightOperands weights(config, experts);

  float* gate_sums = workspace.tile;
  float* up_sums = workspace.tile + kGateUpColumns * task.num_rows;
  for (const auto& [projection, sums] :
       {std::pair(Projection::kGate, gate_sums), std::pair(Projection::kUp, up_sums)}) {
    multiply(rows, weights.rows(projection, task.expert, task.first_column, num_columns, workspace),
             x.width(), sums, workspace);
    x.scale_sums(task.first_row, task.num_rows, weights.result_factor(projection, task.expert),
                 sums, num_columns);
  }
  const float* gate_bias =
      bias_of(experts.gate_bias, task.expert, task.first_column, num_columns, workspace.bias);
  const float* up_bias = bias_of(experts.up_bias, task.expert, task.first_column, num_columns,
                                 workspace.bias + kGateUpColumns);

  // Only a backward reads h1 again.
  std::array<BF16, 2 * kGateUpColumns> h1_row{};
  for (std::int64_t row = 0; row < task.num_rows; ++row) {
    BF16* gate =
        config.inference ? h1_row.data() : h1_.row(task.first_row + row) + task.first_column;
    BF16* up = gate + (config.inference ? kGateUpColumns : config.intermediate_dim);
    BF16* h2 = h2_.row(task.first_row + row) + task.first_column;
    round_with_bias(gate_sums + row * num_columns, gate_bias, gate, num_columns);
    round_with_bias(up_sums + row * num_columns, up_bias, up, num_columns);
    activate(gate, up, h2, num_columns);
    if (clip_limit_) {
      gates_clipped_ += count_above(gate, *clip_limit_, num_columns);
      ups_clipped_ += count_outside(up, *clip_limit_, num_columns);
    }
  }
}

void CpuBackend::w2_scatter(const ForwardCall& call) {
  if (has_codes()) encode(h2_, coded_h2_, h2_columns_);
  list_w2_tasks();
  compute_w2(call.experts);
  if (!is_single()) {
    if (setup_.config.combine == Combine::kPerRoute) {
      return_route_rows(h3_);
    } else {
      return_partial_sums();
    }
  }
}

void CpuBackend::list_w2_tasks() { list_tasks(setup_.config.hidden_dim, kDownColumns); }

void CpuBackend::compute_w2(const ExpertMatrices& experts) {
  pool_.run(static_cast<std::int64_t>(tasks_.size()),
            [&](std::int64_t task, int worker) { w2_task(experts, task, worker); });
}

void CpuBackend::w2_task(const ExpertMatrices& experts, std::int64_t task_idx, int worker) {
  const ProductTask& task = tasks_[static_cast<std::size_t>(task_idx)];
  const Workspace& workspace = workspaces_[static_cast<std::size_t>(worker)];
  const RowOperand h2 = has_codes() ? RowOperand(coded_h2_) : RowOperand(h2_);
  const MatrixView rows = h2.rows(task.first_row, task.num_rows, workspace);
  const WeightOperands weights(setup_.config, experts);
  multiply(
      rows,
      weights.rows(Projection::kDown, task.expert, task.first_column, task.num_columns, workspace),
      h2.width(), workspace.tile, workspace);
  h2.scale_sums(task.first_row, task.num_rows,
                weights.result_factor(Projection::kDown, task.expert), workspace.tile,
                task.num_columns);
  const float* bias =
      bias_of(experts.bias2, task.expert, task.first_column, task.num_columns, workspace.bias);
  for (std::int64_t row = 0; row < task.num_rows; ++row) {
    round_with_bias(workspace.tile + row * task.num_columns, bias,
                    h3_.row(task.first_row + row) + task.first_column, task.num_columns);
  }
}

}  // namespace distmoe::cpu
