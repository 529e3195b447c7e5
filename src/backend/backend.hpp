// SPDX-License-Identifier: Apache-2.0
//
// What a machine has to offer so that the sequences of a call (runtime/forward.cpp, backward.cpp)
// run on it. The CPU backend is the specification of every step.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "backend/expert_matrices.hpp"
#include "distmoe/communicator.hpp"
#include "distmoe/config.hpp"
#include "distmoe/error.hpp"
#include "distmoe/memory_plan.hpp"
#include "distmoe/tensor.hpp"
#include "plan/slot_ledger.hpp"

namespace distmoe {

/// RMSNorm between W2 and the combine.
struct NormCall {
  float eps = 0.0F;
  const BF16* gamma_D = nullptr;  ///< null: 1
  float gain_center = 0.0F;
  bool uses_kahan = false;
};

/// One forward call of this rank, its arguments checked.
struct ForwardCall {
  std::int64_t index = 0;  ///< of the context's calls, from 1
  std::int64_t num_tokens = 0;
  TensorView x_TD;
  TensorView topk_ids_TK;
  TensorView topk_scores_TK;
  ExpertMatrices experts;
  TensorView y_TD;
  std::optional<NormCall> norm{};
  TensorView clip_counts_3{};  ///< not given where nothing is counted
  float clip_limit = 0.0F;
  void* stream = nullptr;
  bool saves = false;                  ///< keeps in a slot what its backward needs
  bool exchanges_rows = false;         ///< every expert returns its rows as they are
  std::optional<SlotTicket> ticket{};  ///< where, unless the call was refused
};

/// Where the gradient of one weight goes; null data where it is not asked for. Row-major without
/// gaps.
struct GradientDestination {
  void* data = nullptr;
  DType dtype = DType::kF32;
  bool accumulates = false;
};

/// One backward call of this rank, its arguments checked.
struct BackwardCall {
  std::int64_t index = 0;
  std::int64_t num_tokens = 0;         ///< of the forward
  std::optional<SlotTicket> ticket{};  ///< of the forward, unless the call was refused
  TensorView dy_TD;
  ExpertMatrices experts;
  std::optional<NormCall> norm;  ///< of the forward
  TensorView grad_x_TD;          ///< not given where it is not asked for
  TensorView grad_scores_TK;
  GradientDestination grad_w13_L2FD;  ///< in the gate_up_layout of the configuration
  GradientDestination grad_w2_LDF;
  GradientDestination grad_bias13_L2F;
  GradientDestination grad_bias2_LD;
  void* stream = nullptr;
};

/// What a call's routing says about load, and what was decided from it.
struct RoutingLoad {
  std::span<const std::int64_t> rows_per_rank;
  std::span<const std::int64_t> rows_per_expert;
  bool is_recomputed = false;  ///< a saving forward that kept its input alone
  std::int64_t scratch_bytes = 0;
};

/// The steps of a call, in the order in which the sequence takes them. Each is collective in the
/// sense that every rank takes it. On the CPU publish, route and publish_backward throw what they
/// find on all ranks; any other exception is of one rank alone, whose context leaves the group. On
/// a device the host does not wait: steps are enqueued, a failed call computes nothing and its
/// fault is what check() throws. A backend may do the work of a step in an earlier one where
/// nothing that a caller sees tells them apart.
class Backend {
 public:
  virtual ~Backend() = default;

  /// Collective, once, when the backends of all ranks exist: what their memory must know of each
  /// other. Construction itself meets no peer, so that a rank that cannot allocate is heard by all.
  virtual void connect() {}

  /// Makes this rank's token count and expert ids known to all. With a `refusal`, whose reason the
  /// peers get instead, it throws on every rank.
  virtual void publish(const ForwardCall& call, const std::optional<Error>& refusal) = 0;
  /// Counts and orders the routed rows; throws capacity_exceeded on every rank where the plan of
  /// any rank has too few rows.
  virtual void route(const ForwardCall& call) = 0;
  /// Decides, for a saving call, whether it saves or recomputes, and places the call's regions in
  /// its slot and in scratch.
  virtual void carve(const ForwardCall& call) = 0;
  /// Gathers the rows of x and computes h1 = W13 x and h2 = SwiGLU(h1). A saving call keeps x.
  virtual void dispatch_w13_swiglu(const ForwardCall& call) = 0;
  /// Computes h3 = W2 h2 and puts every row where the owner of its token reads it.
  virtual void w2_scatter(const ForwardCall& call) = 0;
  /// y = the weighted sum of every token's routes. A saving call keeps h3 of its routes.
  virtual void combine(const ForwardCall& call) = 0;

  /// This rank takes part in no further call: peers whose calls do not ask the communicator hear of
  /// it at once. Waits for nobody.
  virtual void leave() noexcept {}

  // An exchange, which measures what moving rows costs: it has these steps in the place of the two
  // products. A backend that has none inherits them, which throw unsupported.

  /// Brings the rows of x, one per (token, peer), to the ranks that own their experts.
  virtual void dispatch_rows(const ForwardCall& call);
  /// Puts a row for every route, the one that was dispatched, where the owner of its token reads
  /// it.
  virtual void return_rows(const ForwardCall& call);

  // The steps of a backward. A backend that has none inherits the first, which throws unsupported
  // on every rank.

  /// Meets the peers as publish() does, and takes the routing and scores that the forward kept.
  virtual void publish_backward(const BackwardCall& call, const std::optional<Error>& refusal);
  /// Finds the regions that the forward kept and places the others in scratch.
  virtual void carve_backward(const BackwardCall& call);
  /// Computes what the forward did not keep: x gathered and h1, and h2.
  virtual void restore_activations(const BackwardCall& call);
  /// Publishes dy and the scores, gathers a row for every route and forms grad_h3 = bf16(dy *
  /// score) there. Full policy: also the scores' gradients sum_d h3 * dy.
  virtual void dispatch_grad_h3(const BackwardCall& call);
  /// DGRAD of W2: grad_h2 = W2^T grad_h3. Lean: W2^T dy, the scores' gradients and grad_h3.
  virtual void w2_dgrad(const BackwardCall& call);
  /// WGRAD of W2: grad_h3 h2^T summed over an expert's rows; and of bias2.
  virtual void w2_wgrad(const BackwardCall& call);
  /// grad_h1. Where it lies is the backend's choice: what a later step reads outlives it.
  virtual void swiglu_backward(const BackwardCall& call);
  /// WGRAD of W13: grad_h1 x^T summed over an expert's rows; and of bias13.
  virtual void w13_wgrad(const BackwardCall& call);
  /// DGRAD of W13: a row of W13^T grad_h1 for every route, put where the owner of its token reads
  /// it.
  virtual void w13_dgrad_scatter(const BackwardCall& call);
  /// grad_x = the sum of every token's route gradients; the scores' gradients reach their owner.
  virtual void reduce_gradients(const BackwardCall& call);

  /// Gives back the slot's bytes of the forward of `ticket`, the last live one of its slot, at the
  /// end of its backward.
  virtual void rewind(const SlotTicket& ticket) = 0;
  /// The same of a forward whose backward does not come; `stream` as in CallOptions.
  virtual void discard(const SlotTicket& ticket, void* stream) = 0;
  /// Empties all slots and forgets the peaks.
  virtual void reset_slots() = 0;
  /// Since creation or the last reset_slots(); a device is waited for.
  virtual RegionPeaks region_peaks() = 0;

  /// Throws invalid_argument where call number `call` cannot be enqueued on the caller's `stream`.
  virtual void check_stream(std::int64_t /*call*/, void* /*stream*/) {}

  /// Waits for the work of this context and throws the first fault since the last check, on every
  /// rank alike. A backend whose steps throw has nothing left to say.
  virtual void check() = 0;

  /// Of the last routed call, nothing of one that failed on a device, which is waited for.
  virtual RoutingLoad load() = 0;
  /// Bytes that the backend's allocator holds.
  virtual std::int64_t allocated_bytes() const = 0;
};

/// Everything that a backend is made of; the communicator is null for a single rank.
struct BackendSetup {
  Config config;
  MemoryPlan plan;
  std::shared_ptr<Communicator> communicator;
  Communicator::Timeout timeout{};
  std::int64_t context_number =
      0;  ///< tells the contexts of one communicator apart, equal on all ranks
  int num_threads = 1;
  int device = 0;  ///< CUDA ordinal
  int rank = 0;
  int size = 1;
};

namespace cpu {
std::unique_ptr<Backend> make_backend(BackendSetup setup);
}

namespace cuda {
/// Throws unsupported in a build without CUDA, on a machine that has no such device, and for what
/// this backend cannot do yet.
std::unique_ptr<Backend> make_backend(BackendSetup setup);
/// Why make_backend cannot work here, in words; empty where it can.
std::string why_unavailable();
}  // namespace cuda

}  // namespace distmoe
