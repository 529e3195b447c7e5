// SPDX-License-Identifier: Apache-2.0
//
// One rank's steps of a call on a Hopper GPU. Every step enqueues a fixed sequence of launches and
// returns; what depends on the routing stays on the device (call_frame.hpp, training_frame.hpp).
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cuda/call_metadata.hpp"
#include "backend/cuda/device_memory.hpp"
#include "backend/cuda/kernels/call_state.hpp"
#include "backend/cuda/kernels/copy_rows.hpp"
#include "backend/cuda/kernels/h1_rows.hpp"
#include "backend/cuda/kernels/norm_args.hpp"
#include "backend/cuda/kernels/peer_barrier.hpp"
#include "backend/cuda/kernels/publish.hpp"
#include "backend/cuda/kernels/route.hpp"
#include "backend/cuda/kernels/slots.hpp"
#include "backend/cuda/kernels/sm90_bf16_few_rows.hpp"
#include "backend/cuda/kernels/sm90_bf16_grouped_gemm.hpp"
#include "backend/cuda/kernels/sm90_bf16_wgrad.hpp"
#include "backend/cuda/kernels/training_rows.hpp"
#include "backend/cuda/peer_windows.hpp"
#include "backend/cuda/scratch_place.hpp"
#include "backend/cuda/select/kernel_choice.hpp"
#include "layout/context_buffers.hpp"

namespace distmoe::cuda {

inline std::uint64_t address_of(const TensorView& tensor) {
  return reinterpret_cast<std::uint64_t>(tensor.data);
}
/// Of rows of BF16.
inline std::int64_t row_stride_bytes(const TensorView& rows) { return rows.strides[0] * 2; }

inline DeviceBias device_bias(const BiasRows& bias) {
  return {.data = bias.data,
          .expert_stride = bias.expert_stride,
          .stride = bias.stride,
          .is_bf16 = bias.dtype == DType::kBF16};
}

inline NormArgs norm_args(const std::optional<NormCall>& norm) {
  if (!norm) return {};
  return {.is_given = 1,
          .eps = norm->eps,
          .gamma_D = reinterpret_cast<const __nv_bfloat16*>(norm->gamma_D),
          .gain_center = norm->gain_center,
          .uses_kahan = norm->uses_kahan ? 1 : 0};
}

inline bool counts_clipped(const ForwardCall& call) { return call.clip_counts_3.is_given(); }

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(BackendSetup setup);
  ~CudaBackend() override;
  CudaBackend(const CudaBackend&) = delete;
  CudaBackend& operator=(const CudaBackend&) = delete;

  void connect() override;
  void leave() noexcept override;
  void publish(const ForwardCall& call, const std::optional<Error>& refusal) override;
  void route(const ForwardCall& call) override;
  void dispatch_w13_swiglu(const ForwardCall& call) override;
  void w2_scatter(const ForwardCall& call) override;
  void combine(const ForwardCall& call) override;
  void dispatch_rows(const ForwardCall& call) override;
  void return_rows(const ForwardCall& call) override;

  /// Of a saving call; scratch is placed at creation, for the rows of the plan.
  void carve(const ForwardCall& call) override;

  void publish_backward(const BackwardCall& call, const std::optional<Error>& refusal) override;
  void carve_backward(const BackwardCall& call) override;
  void restore_activations(const BackwardCall& call) override;
  void dispatch_grad_h3(const BackwardCall& call) override;
  /// SwiGLU's gradient is taken in the epilogue.
  void w2_dgrad(const BackwardCall& call) override;
  void w2_wgrad(const BackwardCall& call) override;
  void w13_wgrad(const BackwardCall& call) override;
  void w13_dgrad_scatter(const BackwardCall& call) override;
  void reduce_gradients(const BackwardCall& call) override;
  void rewind(const SlotTicket& ticket) override;
  void discard(const SlotTicket& ticket, void* stream) override;
  void reset_slots() override;
  RegionPeaks region_peaks() override;

  void check_stream(std::int64_t call, void* stream) override;
  void check() override;
  RoutingLoad load() override;
  std::int64_t allocated_bytes() const override { return memory_.allocated_bytes(); }

  /// For tests that look at what routing and dispatch left behind.
  const DeviceMemory& memory() const { return memory_; }
  /// For tools under which kernels of one device follow each other, so that none may wait for
  /// another (compute-sanitizer): every barrier becomes a kernel that signals and one that waits,
  /// and between them `order` makes `stream` wait for what the peers' streams hold so far.
  void split_barriers(std::function<void(cudaStream_t stream)> order) {
    order_peers_ = std::move(order);
  }

 private:
  /// The caller's stream, or the context's own.
  template <typename Call>
  cudaStream_t stream_of(const Call& call) const {
    return call.stream != nullptr ? static_cast<cudaStream_t>(call.stream) : own_stream_;
  }
  PeerBarrierArgs barrier_args(PeerBarrier barrier) const;
  void meet_peers(PeerBarrier barrier, cudaStream_t stream);
  PublishArgs publish_args(const ForwardCall& call) const;
  RouteArgs route_args(const ForwardCall& call) const;
  /// A call of few tokens with peers: route() begins the call and publishes too, in one launch.
  bool joins_publish_and_route() const;
  /// combine() meets the peers in its launch.
  bool joins_meeting_and_combine(const ForwardCall& call) const;
  void meet_before_combine(const ForwardCall& call);
  /// What wait_for_calls() and the destructor wait for; a captured call is its replayer's.
  void mark_end_of_call(cudaStream_t stream);
  /// The rest of a call whose arguments this host refuses: peers find the refusal and compute
  /// nothing, this rank keeps in step with them. What it finds of a lost peer check() throws.
  [[noreturn]] void end_refused_call(const Error& refusal, cudaStream_t stream);
  /// A refused stream is replaced by the context's own, which nobody has ordered.
  void follow_last_call(cudaStream_t stream) const;
  /// Waits for the calls of this context alone: on a shared device a peer may already wait for this
  /// rank's next call.
  void wait_for_calls();
  CallState read_state();
  void copy_from_device(void* out, const void* source, std::size_t bytes);
  /// A call of few rows: dispatch_w13_swiglu() makes both products in one launch.
  std::optional<FewRowsTiles> few_rows_tiles(const ForwardCall& call) const;
  /// With peers: the grouped products are launched too, for when these send more rows.
  bool launches_grouped(const std::optional<FewRowsTiles>& tiles) const;
  /// Which of the two computes: that of few rows up to so many.
  std::int32_t most_few_rows() const;
  /// That launch makes the whole call of a rank without peers, and the other steps have nothing to
  /// enqueue.
  bool is_one_launch(const ForwardCall& call) const;
  FewRowsArgs few_rows_args(const ForwardCall& call, const FewRowsTiles& tiles) const;
  /// What a rank without peers reads and writes beside its products.
  void add_whole_call(const ForwardCall& call, FewRowsArgs& args) const;
  GatherPull pull_args() const;
  GroupedGemmArgs product_args(Product product) const;
  /// A product's weights, biases and sizes.
  GroupedGemmArgs w13_args(const ExpertMatrices& experts) const;
  GroupedGemmArgs w2_args(const ExpertMatrices& experts) const;
  CUtensorMap w13_map(const ExpertMatrices& experts, const WeightBox& box) const;
  CUtensorMap w2_map(const ExpertMatrices& experts, const WeightBox& box) const;
  RowTable h2_rows() const;
  void copy_rows(CopiedRows rows, const RowTable& from, const RowTable& to, cudaStream_t stream);
  RowTable h3_rows() const;
  W13Layout w13_layout(const ExpertMatrices& experts) const;
  W2Layout w2_layout(const ExpertMatrices& experts) const;
  std::int64_t num_local() const;
  WeightDims weight_dims() const;
  /// Rows of peers that the plan gathers at most.
  std::int64_t gather_rows() const;
  /// On the device: where scratch lies in the call whose frame it is.
  const ScratchPlace* scratch() const {
    return &memory_.buffer_of<CallFrame>(buffer_name::kCallFrame)->scratch;
  }
  ScratchLimits scratch_limits() const {
    return {.hidden_dim = setup_.config.hidden_dim,
            .intermediate_dim = setup_.config.intermediate_dim,
            .is_inference = setup_.config.inference,
            .is_lean = is_lean(),
            .end = activations_at(memory_.activation_bytes())};
  }
  /// Where W2 stores its rows.
  RowTable result_rows() const;
  bool combines_per_rank() const;
  /// Where the peers read this rank's scores; 0 where they do not.
  std::uint64_t score_window() const;
  SumTables sum_tables() const;
  void send_rank_sums(const ForwardCall& call);
  /// What combine per_rank sums: a row for every route of this rank.
  RowTable summed_rows(const ForwardCall& call) const;
  ClipArgs clip_args(const ForwardCall& call) const;
  void w13_with_clip_statistics(const ForwardCall& call, GroupedGemmArgs args,
                                const CUtensorMap& map);
  std::uint64_t timeout_ns() const;
  // cuda_training.cpp
  void prepare_training();
  void take_metadata(const std::optional<SlotTicket>& ticket);
  SlotArgs slot_args(const SlotTicket& ticket) const;
  std::uint64_t activations_at(std::int64_t offset) const;
  TrainingFrame* training_frame() const;
  TokenRows token_rows() const;
  RouteLimits route_limits() const;
  int row_blocks() const;
  void spread_x(const TensorView& x_TD, bool is_backward, cudaStream_t stream);
  void keep_h3(const ForwardCall& call);
  // cuda_backward.cpp
  bool is_lean() const { return setup_.config.activation_policy == ActivationPolicy::kLean; }
  std::int64_t score_offset() const;
  float* published_scores() const;
  void finish_lean_scores(const BackwardCall& call);
  GroupedGemmArgs backward_args(Product product) const;
  void add_weight_gradient(const BackwardCall& call, const GradientDestination& out,
                           WgradArgs args) const;
  void add_bias_gradient(const BackwardCall& call, const GradientDestination& out,
                         const std::uint64_t* grads, std::int64_t width, std::int64_t half) const;

  BackendSetup setup_;
  DeviceMemory memory_;
  cudaStream_t own_stream_ = nullptr;
  cudaEvent_t last_call_done_ = nullptr;
  EncodeTiled encode_ = nullptr;
  ChoiceInputs choice_inputs_;                    ///< from connect() on, as
  ContextChoice choice_;                          ///< how this rank's calls run, from connect() on
  std::int64_t capacity_rows_;                    ///< rows that the plan has for a call
  std::optional<cudaStream_t> call_in_progress_;  ///< of this host; where its kernels are
  bool is_connected_ = false;                     ///< the windows of all ranks are known
  std::vector<std::shared_ptr<std::byte>> peers_windows_;  ///< that calls write to
  std::optional<SlotTicket> ticket_;  ///< of the call that metadata_ belongs to
  cudaStream_t backward_stream_ = nullptr;
  CallMetadata metadata_;  ///< of the last call
  std::function<void(cudaStream_t)> order_peers_;
  std::vector<std::int64_t> rows_per_rank_;
  std::vector<std::int64_t> rows_per_expert_;
};

}  // namespace distmoe::cuda
