// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "distmoe/config.hpp"
#include "distmoe/export.hpp"
#include "distmoe/tensor.hpp"

namespace distmoe {

/// How a weight is quantised: what the contexts are configured with that will use it.
struct BlockScaledConfig {
  Precision format = Precision::kMXFP8;  ///< kMXFP8, kNVFP4 or kMXFP4
  bool inference = false;                ///< NVFP4 and MXFP4: true
  /// Of W13. Interleaved: the even rows are one matrix and the odd rows another, and a tile of 32
  /// rows has rows of one of them, so that both layouts give the same bits.
  GateUpLayout gate_up_layout = GateUpLayout::kConcatenated;
};

/// A weight [L, N, K] of L experts as codes with block scales, in memory that the caller owns. Rows
/// lie in the order of the weight.
///
/// | format | codes | scales | global_scales |
/// | --- | --- | --- | --- |
/// | MXFP8 training | f8_e4m3 [L, N, K] | f8_e8m0 [L, N / 32, K / 32], of tiles | |
/// | MXFP8 inference | f8_e4m3 [L, N, K] | f8_e8m0 [L, N, K / 32] | |
/// | NVFP4 | uint8 [L, N, K / 2] | f8_e4m3 [L, N, K / 16] | fp32 [L, 1]; W13 also [L, 2] |
/// | MXFP4 | uint8 [L, N, K / 2] | f8_e8m0 [L, N, K / 32] | |
///
/// Two 4-bit codes lie in a byte, the even element in the low nibble. A tile's scale is that of its
/// codes read along K (FPROP) and along N (DGRAD): one set of codes and scales serves both. Tile
/// rows of interleaved weights alternate like their rows: 2i of the gates, 2i + 1 of the ups.
/// An element is code * scale, in NVFP4 times the expert's global scale (1 / g of the numerics);
/// [L, 2] has one for the gate and one for the up rows. The expert stride may be larger than the
/// matrix; the matrices themselves are row-major without gaps.
struct PreparedWeightView {
  BlockScaledConfig config{};
  TensorView codes = {};
  TensorView scales = {};
  TensorView global_scales = {};  ///< NVFP4 alone
  /// A call reads all block scales and refuses one that is NaN (below), unless this says that they
  /// are known. They are in a PreparedWeight: a NaN scale there stands for a weight that was NaN
  /// or infinite, and reaches the results of its expert as that does. Set it after check_scales()
  /// for codes that come from elsewhere, whose calls then read no scale but those they multiply.
  bool has_known_scales = false;

  bool is_given() const noexcept { return codes.is_given(); }
};

/// A prepared weight with memory of its own on the CPU.
class DISTMOE_EXPORT PreparedWeight {
 public:
  PreparedWeight() noexcept;  ///< of no weight
  /// Memory for a weight [L, N, K] of `config`, not filled: by refill_prepared_weight(), or by
  /// others, who call check_scales() when they have. Throws as prepare_block_scaled_weight does.
  PreparedWeight(const BlockScaledConfig& config, std::int64_t num_experts, std::int64_t num_rows,
                 std::int64_t num_columns);
  PreparedWeight(PreparedWeight&& other) noexcept;
  PreparedWeight& operator=(PreparedWeight&& other) noexcept;
  PreparedWeight(const PreparedWeight&) = delete;
  PreparedWeight& operator=(const PreparedWeight&) = delete;
  ~PreparedWeight();

  /// Valid while this lives; its addresses never change, moved or refilled.
  const PreparedWeightView& view() const noexcept { return view_; }
  std::size_t num_bytes() const noexcept;  ///< of codes and scales

 private:
  PreparedWeightView view_;
  std::unique_ptr<std::byte[]> memory_;
};

/// Quantises `weight`, BF16 [L, N, K] or W13 as [L, 2, F, D], in host memory with rows without
/// gaps between their elements. The bits are those with which a context computes that is given the
/// BF16 weight itself. A NaN or an infinity makes the codes and scales of its block NaN (NVFP4: of
/// its expert), as docs/execution says.
///
/// Throws invalid_argument, before anything is written, for a format that is none of the three,
/// NVFP4 or MXFP4 without `inference`, another type, shape or place, and N or K that are no
/// multiple of what the format's blocks need, with the values; out_of_memory, with the bytes.
DISTMOE_EXPORT PreparedWeight prepare_block_scaled_weight(const TensorView& weight,
                                                          const BlockScaledConfig& config);
/// The same into memory that is there, whose addresses stay.
DISTMOE_EXPORT void refill_prepared_weight(const TensorView& weight, const PreparedWeightView& out);

/// Throws invalid_argument for a scale of `weight`, in host memory, that is NaN (MXFP4: above 252;
/// NVFP4: NaN or negative), and a global scale that is not finite and positive, with its expert,
/// row and block. As a call does for a weight without known scales; global scales are looked at in
/// every call.
DISTMOE_EXPORT void check_scales(const PreparedWeightView& weight);

}  // namespace distmoe
