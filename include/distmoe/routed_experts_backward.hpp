// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "distmoe/config.hpp"
#include "distmoe/context.hpp"
#include "distmoe/export.hpp"
#include "distmoe/routed_experts.hpp"
#include "distmoe/saved_forward.hpp"
#include "distmoe/tensor.hpp"

namespace distmoe {

/// Where the gradient of one weight goes: memory of the caller, BF16 or FP32 whatever the weight
/// is (as Config::wgrad_dtype says, where it names a type), contiguous. Not given: the gradient is
/// not computed.
struct WeightGradient {
  TensorView tensor = {};
  /// Adds the FP32 gradient to what is there, in FP32; BF16 rounds that sum to BF16. Experts
  /// without rows stay untouched. Otherwise everything is overwritten, with zeros where an expert
  /// has no rows.
  bool accumulates = false;
};

/// The type that destinations made for a caller have: BF16, that of the weights, unless the
/// configuration names another.
DISTMOE_EXPORT DType weight_gradient_dtype(const Config& config) noexcept;

/// What a backward writes. Every member is optional and belongs to the caller; none may have memory
/// in common with another, the weights, the biases or dy.
struct RoutedGradients {
  TensorView grad_x_TD = {};       ///< BF16; rows may be strided
  TensorView grad_scores_TK = {};  ///< contiguous, of the type of the forward's scores
  WeightGradient grad_w13_L2FD{};  ///< rows in the order of the weights; also as [L, 2, F, D]
  WeightGradient grad_w2_LDF{};
  WeightGradient grad_bias13_L2F{};  ///< only where the call has bias13
  WeightGradient grad_bias2_LD{};    ///< only where the call has bias2
};

/// The backward of the forward that `saved` is of: gradients of x, the scores and the weights from
/// dy_TD, the gradient of y (BF16 [T, D] with the forward's T; rows may be strided).
///
/// `weights` are those of the forward, unchanged and with the same biases; ids, scores and
/// activations are the context's own copies, so that what the caller did with its own since changes
/// nothing. A layer that kept its input alone is computed again, with the same bits. Which slot is
/// selected does not matter.
///
/// A route with id -1 has a score gradient of exactly 0. No bit depends on the number of ranks,
/// threads or the run: weight gradients sum an expert's rows in the order of local expert, source
/// rank, token, k, and x's gradient sums a token's routes in the order of k, both in FP32.
///
/// Collective: every rank runs the backward of the same forward, with destinations of its own. On
/// success the slot's bytes are free again and `saved` is of no forward. On the CPU, on an error
/// that one of the ranks' arguments caused nothing is written on any rank and `saved` stays live,
/// so that the call can be made again; after peer_lost and out_of_memory destinations may be partly
/// written.
///
/// Throws on every rank invalid_argument where an argument of any rank breaks the contract, among
/// them a `saved` that had its backward, is not the last live one of its slot, is of another
/// context or of before a reset(); peer_mismatch where ranks run backwards of different forwards;
/// peer_lost, closed.
///
/// On CUDA only the rank whose host refuses its arguments throws, and its `saved` stays live. The
/// peers' backward is a failed call: it uses up their `saved`, fills fresh gradients with NaN,
/// leaves those that are added to as they are, and Context::check() names the rank. The slots then
/// differ from rank to rank: reset() on every rank before the next saving forward.
DISTMOE_EXPORT void routed_experts_backward(Context& context, SavedForward&& saved,
                                            const TensorView& dy_TD, const ExpertWeights& weights,
                                            const RoutedGradients& gradients,
                                            const CallOptions& options = {});

}  // namespace distmoe
