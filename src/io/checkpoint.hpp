// SPDX-License-Identifier: Apache-2.0
//
// The routed experts of a Hugging Face checkpoint directory: config.json with model.safetensors, or
// with model.safetensors.index.json and its shards. docs/checkpoints.md lists the names, layouts
// and precisions that are understood.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "distmoe/config.hpp"
#include "distmoe/routed_experts.hpp"
#include "distmoe/tensor.hpp"
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

/// The experts [first_expert, first_expert + L) of one layer, whatever the file's layout: W13 with
/// the F gate rows first and then the F up rows, both matrices output-major, in BF16. Movable;
/// moving keeps the addresses. L may be 0.
struct LoadedExperts {
  std::int64_t first_expert = 0;
  std::int64_t num_experts = 0;  ///< L
  std::int64_t hidden_dim = 0;
  std::int64_t intermediate_dim = 0;
  bool has_bias = false;
  DType bias13_dtype = DType::kBF16;  ///< as in the file: BF16 or FP32
  DType bias2_dtype = DType::kBF16;
  TensorStorage w13;     ///< [L, 2F, D]
  TensorStorage w2;      ///< [L, D, F]
  TensorStorage bias13;  ///< [L, 2F]
  TensorStorage bias2;   ///< [L, D]

  /// Refers to the storage of this object.
  ExpertWeights view() const;
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

 private:
  struct Impl;
  explicit Checkpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace distmoe
