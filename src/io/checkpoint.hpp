// SPDX-License-Identifier: Apache-2.0
//
// The routed experts of a Hugging Face checkpoint directory: config.json with model.safetensors, or
// with model.safetensors.index.json and its shards. docs/checkpoints.md lists the names, layouts
// and precisions that are understood.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "distmoe/config.hpp"
#include "distmoe/routed_experts.hpp"
#include "distmoe/tensor.hpp"
#include "formats/block_scaled.hpp"
#include "io/tensor_storage.hpp"

namespace distmoe {

/// Of one MoE layer; all layers of a checkpoint have the same.
struct LayerShape {
  std::int64_t num_experts = 0;       ///< E
  std::int64_t top_k = 0;             ///< K
  std::int64_t hidden_dim = 0;        ///< D
  std::int64_t intermediate_dim = 0;  ///< F of one expert
  Activation activation = Activation::kSwiGLU;
  double swiglu_alpha = 1.702;  ///< of kSwiGLUClamped
  double swiglu_limit = 7.0;    ///< of kSwiGLUClamped
  bool has_bias = false;
  bool operator==(const LayerShape&) const = default;
};

/// How a file stores the matrices of experts. Coded ones are quantised along the row.
enum class StoredFormat : std::uint8_t {
  kBF16,
  kFp8Blocks,  ///< E4M3 with a scale of 128 x 128 elements
  kMxfp8,
  kMxfp4,
  kNvfp4,
};
/// That of contexts which compute with codes of kMxfp8, kMxfp4 or kNvfp4.
Precision precision_of(StoredFormat format);

/// Sizes and biases of the experts [first_expert, first_expert + L) of one layer. L may be 0.
struct ExpertBiases {
  std::int64_t first_expert = 0;
  std::int64_t num_experts = 0;  ///< L
  std::int64_t hidden_dim = 0;
  std::int64_t intermediate_dim = 0;
  bool has_bias = false;
  DType bias13_dtype = DType::kBF16;  ///< as in the file: BF16 or FP32
  DType bias2_dtype = DType::kBF16;
  TensorStorage bias13;  ///< [L, 2F], gate first
  TensorStorage bias2;   ///< [L, D]
};

/// These experts whatever the file's layout: W13 with the F gate rows first and then the F up rows,
/// both matrices output-major, in BF16. Movable; moving keeps the addresses.
struct LoadedExperts : ExpertBiases {
  TensorStorage w13;  ///< [L, 2F, D]
  TensorStorage w2;   ///< [L, D, F]

  /// Refers to the storage of this object.
  ExpertWeights view() const;
  std::int64_t num_bytes() const;
};

/// A matrix [L, N, K] as codes: U8 [L, N, K / 2] of 4-bit formats or E4M3 [L, N, K]; scales E8M0
/// [L, N, K / 32], or of tiles [L, N / 32, K / 32], or, of NVFP4, E4M3 [L, N, K / 16]; NVFP4 also
/// has an FP32 global scale of each expert, W13 one for the gate and one for the up rows. An
/// element is code * scale * global scale.
struct CodedWeight {
  TensorStorage codes;
  TensorStorage scales;
  TensorStorage global_scales;  ///< [L, 2] of W13, [L, 1] of W2
};

/// LoadedExperts as the file has them, not decoded.
struct CodedExperts : ExpertBiases {
  StoredFormat format = StoredFormat::kMxfp8;  ///< kMxfp8, kMxfp4 or kNvfp4
  BlockShape blocks = BlockShape::kRows;       ///< kTiles: for MXFP8 training
  CodedWeight w13;                             ///< N = 2F, gate rows first, K = D
  CodedWeight w2;                              ///< N = D, K = F

  /// Prepared weights for contexts of the format, of inference or, with tiles, of training. Refers
  /// to the storage of this object.
  ExpertWeights view() const;
  std::int64_t num_bytes() const;
};

/// An opened checkpoint. Opening reads config.json and the headers of the shards and checks every
/// expert tensor of every layer by name, type and shape, so that a damaged checkpoint is refused
/// before any weight is read. All members are const and may be called from several threads.
class Checkpoint {
 public:
  /// Throws io for what cannot be read or is damaged (the message names tensor, expert and file),
  /// unsupported for an architecture, activation or quantisation that distmoe does not know.
  static Checkpoint open(const std::filesystem::path& directory);

  /// The names that every checkpoint of `directory` is looked up under, existing or not.
  static std::vector<std::filesystem::path> well_known_files(
      const std::filesystem::path& directory);

  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

  /// What an output must not replace: the well-known files and all shards.
  std::vector<std::filesystem::path> files() const;
  /// "Qwen3MoeForCausalLM".
  const std::string& architecture() const noexcept;
  const LayerShape& shape() const noexcept;
  /// The layers that have routed experts, ascending.
  const std::vector<std::int64_t>& moe_layers() const noexcept;

  /// Reads the bytes of these experts and of no other, converting straight from the mapping. Throws
  /// invalid_argument for a layer without routed experts or experts outside [0, E), io for a scale
  /// that is no finite number, out_of_memory.
  LoadedExperts load_experts(std::int64_t layer, std::int64_t first_expert,
                             std::int64_t num_experts) const;
  /// The codes themselves. FP8 of 128 x 128 blocks becomes MXFP8 where every scale is a power of
  /// two, so that nothing is rounded; it alone has the scales of `blocks` kTiles. Throws as
  /// load_experts does, and unsupported for a layer whose matrices have no codes, not all in one
  /// format or not with these blocks.
  CodedExperts load_coded_experts(std::int64_t layer, std::int64_t first_expert,
                                  std::int64_t num_experts,
                                  BlockShape blocks = BlockShape::kRows) const;
  /// Of all matrices of a layer; empty where they differ.
  std::optional<StoredFormat> stored_format(std::int64_t layer) const;

 private:
  struct Impl;
  const Impl& checked(std::int64_t layer, std::int64_t first_expert,
                      std::int64_t num_experts) const;
  explicit Checkpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace distmoe
