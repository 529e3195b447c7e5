// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "distmoe/export.hpp"

namespace distmoe {

enum class Precision { kBF16, kMXFP8, kNVFP4, kMXFP4 };
/// Launch topology of the block-scaled precisions; without effect for BF16.
enum class Pipeline { kStaged, kMega };
/// What a training forward keeps: design of the two policies in docs/memory-plan.md.
enum class ActivationPolicy { kFull, kLean };
/// What travels back: one row per route, or one FP32 row per (token, rank).
enum class Combine { kPerRoute, kPerRank };
enum class Activation { kSwiGLU, kSwiGLUClamped };
/// Order of the 2F rows of W13: F gate rows then F up rows, or g0, u0, g1, u1, ...
enum class GateUpLayout { kConcatenated, kInterleaved };
/// Type of the weights' gradients.
enum class WgradDType { kSameAsWeight, kBF16, kF32 };
/// kFixed: D, F and precision alone decide how sums are ordered (bits equal for every P).
enum class KernelChoice { kTuned, kFixed };

/// Scratch beyond the device factor that lives in host memory.
struct HostScratch {
  double total_scratch_capacity_factor = 16.0;
  bool prefetch = true;
  bool operator==(const HostScratch&) const = default;
};

/// Everything that fixes the memory and the arithmetic of a context. The same on every rank.
/// Validated where it is used (`validate`, `plan_memory`, `Context::create`).
struct Config {
  // Required: no legal default.
  std::int64_t max_tokens = 0;                          ///< tokens of one rank in one call, at most
  std::int64_t hidden_dim = 0;                          ///< D
  std::int64_t intermediate_dim = 0;                    ///< F of one expert
  std::int64_t top_k = 0;                               ///< K
  std::int64_t num_experts = 0;                         ///< E, over all ranks
  std::int64_t max_moe_layers_per_activation_slot = 0;  ///< N

  double device_scratch_capacity_factor = 2.0;  ///< rows planned, in units of balanced T*K
  std::optional<std::int64_t> activation_slot_bytes = std::nullopt;
  std::optional<double> activation_slot_capacity_factor = std::nullopt;
  std::int64_t num_activation_slots = 1;
  ActivationPolicy activation_policy = ActivationPolicy::kFull;
  bool distinct_experts = true;  ///< a token names an expert at most once (bounds the rows)
  std::optional<HostScratch> host_scratch = std::nullopt;
  Precision precision = Precision::kBF16;
  Pipeline pipeline = Pipeline::kStaged;
  Combine combine = Combine::kPerRoute;
  Activation activation = Activation::kSwiGLU;
  double swiglu_alpha = 1.702;  ///< of kSwiGLUClamped
  double swiglu_limit = 7.0;    ///< of kSwiGLUClamped
  /// kBF16 and kF32: a backward refuses destinations of another type, so that all ranks have one.
  /// kSameAsWeight: each destination is of either type, and one that is made for a caller of the
  /// type of the weights.
  WgradDType wgrad_dtype = WgradDType::kSameAsWeight;
  bool inference = false;
  std::optional<std::int64_t> num_sms = std::nullopt;  ///< SMs that a CUDA context may use
  GateUpLayout gate_up_layout = GateUpLayout::kConcatenated;
  KernelChoice kernel_choice = KernelChoice::kTuned;  ///< today's kernels: the same bits either way
  /// Bound of every wait for a peer. Default: 300 s on the CPU, 600 s on GPUs.
  std::optional<std::chrono::milliseconds> timeout = std::nullopt;

  bool operator==(const Config&) const = default;
};

/// Throws invalid_argument for the first rule that `config` breaks, with the value and the legal
/// range. Pure; no device is asked.
DISTMOE_EXPORT void validate(const Config& config);

}  // namespace distmoe
