// SPDX-License-Identifier: Apache-2.0
//
// Weights as products take them: slabs of BF16. A prepared weight is decoded slab by slab, in the
// workspace of the thread that multiplies it; one that is BF16 while the precision has codes is
// quantised there first, to the same codes.
#pragma once

#include <cstdint>

#include "backend/cpu/matmul.hpp"
#include "backend/cpu/packed_columns.hpp"
#include "backend/expert_matrices.hpp"
#include "distmoe/config.hpp"

namespace distmoe::cpu {

/// One of an expert's matrices: gate and up are [F, D], down is [D, F].
enum class Projection { kGate, kUp, kDown };

class WeightOperands {
 public:
  WeightOperands(const Config& config, const ExpertMatrices& experts)
      : config_(config), experts_(experts) {}

  /// Rows for FPROP, at most kCpuPackedColumns from a multiple of it on. Those of one call at a
  /// time: the workspace holds one slab.
  MatrixView rows(Projection projection, std::int64_t expert, std::int64_t first,
                  std::int64_t count, const Workspace& workspace) const;
  /// Columns for DGRAD, at most kCpuPackedColumns from a multiple of it on: of W2 with depth D, of
  /// W13 with depth 2F, gate first whatever the layout.
  DepthRows w2_columns(std::int64_t expert, std::int64_t first, std::int64_t count,
                       const Workspace& workspace) const;
  DepthRows w13_columns(std::int64_t expert, std::int64_t first, std::int64_t count,
                        const Workspace& workspace) const;
  /// What sums over a weight's codes are multiplied by besides: NVFP4's fp32(1 / g), elsewhere 1.
  float result_factor(Projection projection, std::int64_t expert) const;

 private:
  struct Slab;
  const CodedMatrix& coded(Projection projection) const;
  MatrixView dense(Projection projection, std::int64_t expert) const;
  std::int64_t num_columns(Projection projection) const;
  bool has_codes() const { return config_.precision != Precision::kBF16; }
  void decode(Projection projection, std::int64_t expert, const Slab& slab, BF16* out,
              const Workspace& workspace) const;
  void decode_prepared(const CodedMatrix& matrix, std::int64_t expert, const Slab& slab,
                       BF16* out) const;
  void quantise_and_decode(const MatrixView& matrix, const Slab& slab, BF16* out,
                           const Workspace& workspace) const;

  const Config& config_;
  const ExpertMatrices& experts_;
};

}  // namespace distmoe::cpu
