// SPDX-License-Identifier: Apache-2.0
//
// Products of a backward for experts of few rows beside those of the matrix library, on one core:
// 64 matrices of 2048 x 768 in memory, with all of them read (DGRAD) or written in BF16 (WGRAD).
// Argument: rows of an expert. bytes_per_second counts the weights.
#include <benchmark/benchmark.h>

#include <memory>
#include <vector>

#include "backend/cpu/elementwise.hpp"
#include "backend/cpu/few_row_products.hpp"
#include "backend/cpu/streamed_store.hpp"

namespace distmoe::bench {
namespace {

using cpu::Workspace;

constexpr std::int64_t kHidden = 2048;
constexpr std::int64_t kIntermediate = 768;
constexpr std::int64_t kExperts = 64;
constexpr std::int64_t kMatrix = kHidden * kIntermediate;
/// Of a tile of a WGRAD.
constexpr std::int64_t kTileRows = 256;
constexpr std::int64_t kTileColumns = 512;

std::vector<BF16> filled(std::int64_t size, float value) {
  return {static_cast<std::size_t>(size), to_bf16(value)};
}

struct Operands {
  std::vector<BF16> matrices = filled(kExperts * kMatrix, 0.02f);
  std::vector<BF16> grads = filled(cpu::kFewRows * 2 * kHidden, 0.5f);
  std::vector<BF16> activations = filled(cpu::kFewRows * 2 * kHidden, 0.25f);
  CpuWorkspaceLayout layout{[] {
    Config config;
    config.hidden_dim = kHidden;
    config.intermediate_dim = kIntermediate;
    return config;
  }()};
  std::vector<std::byte> bytes =
      std::vector<std::byte>(static_cast<std::size_t>(layout.bytes) + 128);
  Workspace workspace() {
    void* base = bytes.data();
    std::size_t space = bytes.size();
    std::align(128, static_cast<std::size_t>(layout.bytes), base, space);
    return {static_cast<std::byte*>(base), layout};
  }
};

void dgrad(benchmark::State& state, bool is_own, std::int64_t depth, std::int64_t num_columns) {
  if (is_own && !cpu::has_few_row_products()) return state.SkipWithError("not on this machine");
  Operands operands;
  const Workspace workspace = operands.workspace();
  const cpu::MatrixView rows{operands.grads.data(), state.range(0), depth};
  for (auto _ : state) {
    for (std::int64_t expert = 0; expert < kExperts; ++expert) {
      for (std::int64_t column = 0; column < num_columns; column += kCpuPackedColumns) {
        const cpu::DepthRows weights{.first = operands.matrices.data() + expert * kMatrix + column,
                                     .num_rows = depth,
                                     .num_columns = kCpuPackedColumns,
                                     .row_stride = num_columns};
        if (is_own) {
          cpu::multiply_few_rows_dgrad(rows, weights, workspace.tile);
        } else {
          cpu::multiply_packed(rows.data, rows.num_rows, depth, weights, workspace.tile, workspace);
        }
      }
    }
  }
  state.SetBytesProcessed(state.iterations() * kExperts * kMatrix * 2);
}

void wgrad_tile(bool is_own, const cpu::RowSlab& a, const cpu::RowSlab& b, std::int64_t num_rows,
                const Workspace& workspace, BF16* out) {
  if (is_own) {
    const cpu::FewRowsWgrad product(a, b, num_rows, workspace);
    auto* rounded = reinterpret_cast<BF16*>(workspace.tile);
    for (std::int64_t row = 0; row < a.num_columns; row += cpu::FewRowsWgrad::kStripRows) {
      product.multiply(row, rounded);
      for (std::int64_t i = 0; i < cpu::FewRowsWgrad::kStripRows; ++i) {
        cpu::store_streamed(rounded + i * product.width(), out + (row + i) * kHidden,
                            kTileColumns * sizeof(BF16));
      }
    }
  } else {
    cpu::multiply_operands({a.data, a.num_columns, num_rows, a.row_stride, true},
                           {b.data, b.num_columns, num_rows, b.row_stride, true}, workspace.tile,
                           kTileColumns, false, workspace);
    std::vector<BF16> rounded(kTileColumns);
    for (std::int64_t row = 0; row < a.num_columns; ++row) {
      cpu::round_with_bias(workspace.tile + row * kTileColumns, nullptr, rounded.data(),
                           kTileColumns);
      cpu::store_streamed(rounded.data(), out + row * kHidden, kTileColumns * sizeof(BF16));
    }
  }
  cpu::finish_streamed_stores();
}

void wgrad(benchmark::State& state, bool is_own) {
  if (is_own && !cpu::has_few_row_products()) return state.SkipWithError("not on this machine");
  Operands operands;
  const Workspace workspace = operands.workspace();
  for (auto _ : state) {
    for (std::int64_t expert = 0; expert < kExperts; ++expert) {
      for (std::int64_t row = 0; row < kIntermediate; row += kTileRows) {
        for (std::int64_t column = 0; column < kHidden; column += kTileColumns) {
          wgrad_tile(is_own, {operands.grads.data() + row, kTileRows, 2 * kIntermediate},
                     {operands.activations.data() + column, kTileColumns, kHidden}, state.range(0),
                     workspace,
                     operands.matrices.data() + expert * kMatrix + row * kHidden + column);
        }
      }
    }
  }
  state.SetBytesProcessed(state.iterations() * kExperts * kMatrix * 2);
}

void set_rows(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgName("rows")->Unit(benchmark::kMillisecond);
  for (const int rows : {4, 8, 12, 16, 24}) benchmark->Arg(rows);
}

BENCHMARK_CAPTURE(dgrad, w2_library, false, kHidden, kIntermediate)->Apply(set_rows);
BENCHMARK_CAPTURE(dgrad, w2, true, kHidden, kIntermediate)->Apply(set_rows);
BENCHMARK_CAPTURE(dgrad, w13_library, false, kIntermediate, kHidden)->Apply(set_rows);
BENCHMARK_CAPTURE(dgrad, w13, true, kIntermediate, kHidden)->Apply(set_rows);
BENCHMARK_CAPTURE(wgrad, library, false)->Apply(set_rows);
BENCHMARK_CAPTURE(wgrad, few_rows, true)->Apply(set_rows);

}  // namespace
}  // namespace distmoe::bench

BENCHMARK_MAIN();
