// SPDX-License-Identifier: Apache-2.0
//
// The matrices of experts as codes, as checkpoints store them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "distmoe/prepared_weight.hpp"
#include "io/checkpoint.hpp"

namespace distmoe::tools {

/// "mxfp8", "mxfp4" or "nvfp4".
const char* format_name(StoredFormat format);
/// Elements of a block along the row.
std::int64_t block_size_of(StoredFormat format);
/// Bytes of the codes of `elements`.
std::int64_t code_bytes_of(StoredFormat format, std::int64_t elements);

/// One matrix [N, K], row by row.
struct QuantisedMatrix {
  std::span<const std::byte> codes;
  std::span<const std::byte> scales;
  float global_scale = 1.0f;  ///< kNvfp4
};

/// The codes with which a context computes that is given the BF16 weights. Gate and up share their
/// global scale.
struct QuantisedExpert {
  PreparedWeight w13;  ///< what the matrices are parts of
  PreparedWeight w2;
  QuantisedMatrix gate{};
  QuantisedMatrix up{};
  QuantisedMatrix down{};
};

/// Of the one expert in `experts`, whose K are multiples of the block. Throws unsupported where a
/// weight is NaN, infinite or too large for the format; `label` names the expert.
QuantisedExpert quantise_expert(const LoadedExperts& experts, StoredFormat format,
                                const std::string& label);

}  // namespace distmoe::tools
