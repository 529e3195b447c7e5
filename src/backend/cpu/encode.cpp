// SPDX-License-Identifier: Apache-2.0
//
// Rows become codes of the block-scaled precisions between the steps that compute them and the
// products that take them: along themselves for FPROP and DGRAD, across themselves for WGRAD, each
// from the BF16 values.
#include "backend/cpu/cpu_backend.hpp"
#include "core/checked_math.hpp"
#include "plan/capacity_rows.hpp"

namespace distmoe::cpu {
namespace {

/// Rows at a time: whole blocks of the codes across them.
constexpr std::int64_t kEncodedRows = 64;
static_assert(kEncodedRows % kMxfp8BlockSize == 0);

}  // namespace

/// The last rows of an expert are followed by its padding, which is zero across the rows; along
/// them it is of no product.
void CpuBackend::encode_band(const BF16Rows& rows, const RowRange& range, const CodedRows& along,
                             const CodedColumns& across) const {
  along.encode(rows, range.begin);
  if (!across.is_placed()) return;
  BF16Rows with_padding = rows;
  if (range.end == routing_.expert_end(range.expert)) {
    with_padding.num_padding_rows =
        ceil_div(range.end, kExpertRowAlignment) * kExpertRowAlignment - range.end;
  }
  across.encode(with_padding, range.begin);
}

void CpuBackend::encode(const DenseRows& rows, const CodedRows& along, const CodedColumns& across) {
  run_rows(kEncodedRows, [&](const RowRange& range, int) {
    encode_band({rows.row(range.begin), range.size(), rows.width, rows.width}, range, along,
                across);
  });
}

}  // namespace distmoe::cpu
