// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "distmoe/context.hpp"
#include "distmoe/export.hpp"
#include "distmoe/prepared_weight.hpp"
#include "distmoe/saved_forward.hpp"
#include "distmoe/tensor.hpp"

namespace distmoe {

/// The weights of this rank's L experts. Borrowed for the call. Each is given once, as BF16 or
/// prepared; both alike. `w13_L2FD` may be given as [L, 2, F, D]; an expert stride larger than the
/// matrix is honoured, the matrices themselves are row-major. Biases are optional, BF16 or FP32.
///
/// Prepared weights are for contexts of their format, inference as they are, [L, 2F, D] in the
/// gate_up_layout of the context and [L, D, F]. Contexts of MXFP8 and MXFP4 also take BF16 and
/// quantise it slab by slab in every call, with the same bits; NVFP4 needs prepared weights.
struct ExpertWeights {
  TensorView w13_L2FD = {};
  TensorView w2_LDF = {};
  TensorView bias13_L2F = {};
  TensorView bias2_LD = {};
  PreparedWeightView prepared_w13 = {};
  PreparedWeightView prepared_w2 = {};
};

/// What the caller's router brings for this rank's T tokens, 0 <= T <= max_tokens.
struct RoutedInput {
  TensorView x_TD;            ///< BF16
  TensorView topk_ids_TK;     ///< int32 or int64; -1 disables a route
  TensorView topk_scores_TK;  ///< FP32 or BF16; used as given, never renormalised
};

/// RMSNorm of every route's result before the combine: y = sum over k of score * h3 * rstd with
/// rstd = 1 / sqrt(mean(h3^2) + eps), in FP32. For combine per_route, and the same on every rank:
/// the CPU throws peer_mismatch where it is not, on CUDA nobody looks. The forward's travels to its
/// backward, for which activation_policy must be full.
struct PostExpertNorm {
  double eps = 1e-6;  ///< finite, > 0; like all numbers here also in FP32
  /// BF16 [D], contiguous, in inference contexts: h3 is multiplied by bf16(gamma + gain_center),
  /// after rstd was taken of it.
  TensorView gamma_D = {};
  double gain_center = 0.0;  ///< finite; not without gamma
  /// Compensated (Kahan) summation over k; not with gamma.
  bool uses_kahan = false;
  /// Backward computes rstd again instead of keeping it. It always does: h3 is there.
  bool recomputes_rstd = false;
};

/// What activations exceed, counted on every forward over the rows that this rank received:
/// elements of gate > limit, elements of up with |up| > limit, and the R * F pairs of them. h1 as
/// the activation reads it, rounded to BF16; NaN exceeds nothing. On CUDA such a call writes h1 to
/// memory, in an inference context too.
struct ClipStatistics {
  /// int64 or FP32 [3], contiguous, in the context's memory; not given: nothing is counted.
  TensorView counts_3 = {};
  double limit = 7.0;  ///< finite, also in FP32; has nothing to do with swiglu_limit
};

struct CallOptions {
  /// A cudaStream_t of the context's device, ignored on the CPU. Calls that follow each other on
  /// different streams are the caller's to order.
  ///
  /// Null is no stream of CUDA's but one of the context's own, which waits for none, not even for
  /// the legacy default stream: inputs must be complete before the call (cudaMemcpyAsync(x, ..., 0)
  /// has them on the way), and Context::check() or last_call() says when y is. For work on the
  /// default stream give cudaStreamLegacy.
  ///
  /// Ranks that share a device need a stream each: kernels of one wait for those of the other. Of
  /// two ranks of a context that give one stream for a call the second gets invalid_argument at
  /// once, the first hears of it at its timeout at the latest. Nobody finds streams that CUDA
  /// orders among each other (the legacy default stream of one, a blocking stream of the other), or
  /// one that ranks share between calls of different contexts: such calls wait until the timeout
  /// and are peer_lost.
  void* stream = nullptr;
  /// Of a forward; a backward takes its forward's.
  std::optional<PostExpertNorm> norm = std::nullopt;
  ClipStatistics clip_statistics = {};  ///< of a forward
};

/// y_TD = sum over k, in order, of score * W2(SwiGLU(W13 x)) of the experts that a token names.
///
/// Collective: every rank calls, in the same order, with any T of its own, zero included. `y_TD` is
/// BF16 [T, D] and belongs to the caller; its rows may be strided, like those of the inputs. It may
/// take the place of x and overlaps nothing else. On the CPU the call returns when y is complete;
/// on error y is not touched and the next correct call works, unless the error closed the context:
/// peer_lost, peer_mismatch, and what one rank met alone (out_of_memory, internal).
///
/// On CUDA the call enqueues its work and returns; the caller orders calls of one context. What
/// only the device can find (an id outside the contract, exceeded capacity, a peer that did not
/// come or whose host refused its arguments) fills y with NaN on every rank and is thrown by
/// Context::check().
///
/// Throws invalid_argument on every rank where an argument of any rank breaks the contract,
/// capacity_exceeded on every rank where the routing needs more rows than the plan of any rank,
/// peer_mismatch, peer_lost, closed.
DISTMOE_EXPORT void routed_experts(Context& context, const RoutedInput& input,
                                   const ExpertWeights& weights, const TensorView& y_TD,
                                   const CallOptions& options = {});

/// Throws what `routed_experts` refuses of types, shapes, strides and devices, without a call: no
/// peer is met and no value is looked at, ids and block scales included. For compilers, which know
/// tensors without memory: any address does.
DISTMOE_EXPORT void check_routed_experts(const Context& context, const RoutedInput& input,
                                         const ExpertWeights& weights, const TensorView& y_TD,
                                         const CallOptions& options = {});

/// The same forward with the same bits, which keeps in the selected activation slot what its
/// backward needs: x gathered, h1 and the results of this rank's routes (activation_policy full) or
/// this rank's x and h1 (lean), where they fit beside what the slot holds and the inputs of the
/// layers to come, else this rank's x alone. All ranks decide alike.
///
/// Throws as routed_experts does, and on every rank invalid_argument where the selected slot of any
/// rank is full or needs reset(), or the context is for inference; unsupported for combine
/// per_rank with activation_policy full (the results of the routes never reach the owner of their
/// token: lean does without them); peer_mismatch where ranks save in different places.
[[nodiscard]] DISTMOE_EXPORT SavedForward saving_routed_experts(Context& context,
                                                                const RoutedInput& input,
                                                                const ExpertWeights& weights,
                                                                const TensorView& y_TD,
                                                                const CallOptions& options = {});

}  // namespace distmoe
