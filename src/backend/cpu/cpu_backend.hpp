// SPDX-License-Identifier: Apache-2.0
//
// The backend that is the specification: plain C++, one rank's steps of a call on the worker
// threads of that rank. Each step has a file of its own.
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cpu/call_metadata.hpp"
#include "backend/cpu/coded_rows.hpp"
#include "backend/cpu/context_memory.hpp"
#include "backend/cpu/matmul.hpp"
#include "backend/cpu/routing.hpp"
#include "backend/cpu/thread_pool.hpp"
#include "backend/cpu/weight_operands.hpp"
#include "layout/call_header.hpp"
#include "plan/scratch_layout.hpp"
#include "plan/slot_stacks.hpp"

namespace distmoe::cpu {

class FewRowsWgrad;

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(BackendSetup setup);
  const ContextMemory& memory() const { return memory_; }
  // Of the last call, to be looked at between its steps: codes of x until W2, of h2 from then on.
  const Routing& routing() const { return routing_; }
  const CodedRows& coded_x() const { return coded_x_; }
  const CodedRows& coded_h2() const { return coded_h2_; }

  void publish(const ForwardCall& call, const std::optional<Error>& refusal) override;
  void route(const ForwardCall& call) override;
  void carve(const ForwardCall& call) override;
  void dispatch_w13_swiglu(const ForwardCall& call) override;
  void w2_scatter(const ForwardCall& call) override;
  void combine(const ForwardCall& call) override;

  void publish_backward(const BackwardCall& call, const std::optional<Error>& refusal) override;
  void carve_backward(const BackwardCall& call) override;
  void restore_activations(const BackwardCall& call) override;
  void dispatch_grad_h3(const BackwardCall& call) override;
  void w2_dgrad(const BackwardCall& call) override;
  void w2_wgrad(const BackwardCall& call) override;
  void swiglu_backward(const BackwardCall& call) override;
  void w13_wgrad(const BackwardCall& call) override;
  void w13_dgrad_scatter(const BackwardCall& call) override;
  void reduce_gradients(const BackwardCall& call) override;
  void rewind(const SlotTicket& ticket) override;
  void discard(const SlotTicket& ticket, void* stream) override;
  void reset_slots() override;
  RegionPeaks region_peaks() override;

  void check() override {}
  RoutingLoad load() override;
  std::int64_t allocated_bytes() const override { return memory_.allocated_bytes(); }

 private:
  void note_load();
  // publish.cpp
  void take_metadata(const std::optional<SlotTicket>& ticket);
  void check_same_call(const CallHeader& header, int peer, const CallHeader& mine,
                       bool is_same) const;
  void exchange_headers(CallHeader mine, const std::optional<SlotTicket>& ticket,
                        const std::optional<Error>& refusal);
  void exchange_ids(const ForwardCall& call);
  // carve.cpp
  void note_scratch(std::int64_t bytes);
  DenseRows rows_at(std::int64_t offset, std::int64_t width) const;
  CodedRows coded_rows_at(std::int64_t offset, std::int64_t width) const;
  CodedColumns coded_columns_at(std::int64_t offset, std::int64_t width) const;
  void place_scratch();
  void place_coded_scratch(const RegionOffsets& scratch);
  void place_gradient_columns(const BackwardCall& call);
  void place_saved(const SavedLayer& layer);
  // dispatch.cpp
  void keep_own_rows(const ForwardCall& call);
  void exchange_rows(const TensorView& rows_TD, bool is_packed);
  /// FP32 of routes that cross to a rank and of those that come from it, a block for each: scores
  /// on their way there, gradients of scores on the way back.
  std::vector<std::span<std::byte>> own_score_blocks() const;
  std::vector<std::span<std::byte>> peer_score_blocks() const;
  void exchange_scores(const ForwardCall& call);
  void gather_rows(const TensorView& rows_TD);
  void gather_coded_rows(const TensorView& x_TD);
  void gather_and_encode_rows(const TensorView& x_TD);
  /// What peers sent, in the order of their tokens (dispatch) or routes (combine).
  const BF16* received_rows() const;
  /// The row of `own_TD`, or of what was received, that routed row `row` is a copy of.
  const BF16* dispatched_row(const TensorView& own_TD, const BF16* received,
                             std::int64_t row) const;
  // encode.cpp
  bool has_codes() const { return is_block_scaled(setup_.config.precision); }
  /// Dispatch carries rows as codes.
  bool sends_codes() const { return has_codes() && setup_.config.inference; }
  /// Quantises rows of one expert, along them and, where there is a place for it, across them.
  void encode_band(const BF16Rows& rows, const RowRange& range, const CodedRows& along,
                   const CodedColumns& across) const;
  void encode(const DenseRows& rows, const CodedRows& along, const CodedColumns& across);
  // activation.cpp
  void activate(const BF16* gate, const BF16* up, BF16* h2, std::int64_t count) const;
  void activate_rows();  ///< h2 of all rows of h1
  // expert_products.cpp
  void compute_w13_swiglu(const ExpertMatrices& experts);
  void list_w2_tasks();
  void compute_w2(const ExpertMatrices& experts);  ///< the listed tasks
  void w13_swiglu_task(const ExpertMatrices& experts, std::int64_t task, int worker);
  void w2_task(const ExpertMatrices& experts, std::int64_t task, int worker);
  // combine.cpp
  void return_route_rows(const DenseRows& rows);
  void return_partial_sums();
  void sum_routes(const ForwardCall& call);
  void sum_ranks(const ForwardCall& call);
  void write_clip_counts(const ForwardCall& call) const;
  class RouteSums;
  /// The result of an enabled route: in `rows` where this rank computed it, else in what returned.
  const BF16* returned_row(const DenseRows& rows, const BF16* returned, std::int64_t route) const;
  // grad_dispatch.cpp
  struct ProductTask;
  bool has_own_rows_alone(const ProductTask& task) const;
  const BF16* h3_row(std::int64_t row) const;
  void exchange_route_scores();
  void list_score_blocks();
  float& route_score(std::int64_t expert, std::int64_t row);
  void gather_grad_h3_task(const BackwardCall& call, const BF16* received, std::int64_t task);
  // grad_products.cpp
  void w2_dgrad_task(const BackwardCall& call, std::int64_t task, int worker);
  void lean_w2_dgrad_task(const BackwardCall& call, std::int64_t task, int worker);
  void w13_dgrad_task(const BackwardCall& call, std::int64_t task, int worker);
  struct WgradTile;
  /// The operands of a weight's gradient: its rows, its columns.
  struct WgradOperands {
    DepthOperand grads;
    DepthOperand activations;
    std::int64_t num_columns = 0;
  };
  void wgrad_sums(const WgradTile& tile, const WgradOperands& operands, const RowRange& rows,
                  const Workspace& workspace) const;
  std::vector<WgradTile> wgrad_tiles(std::int64_t num_halves, std::int64_t num_rows,
                                     std::int64_t num_columns) const;
  template <typename RowInWeight>
  void wgrad_tile(const WgradTile& tile, const WgradOperands& operands,
                  const GradientDestination& out, const RowInWeight& row_in_weight, int worker);
  template <typename FirstOf>
  static void store_few_rows_wgrad(const FewRowsWgrad& product, const WgradTile& tile,
                                   const GradientDestination& out, const FirstOf& first_of,
                                   const Workspace& workspace);
  void sum_expert_rows(const DenseRows& grads, bool is_interleaved, const GradientDestination& out);
  // grad_reduce.cpp
  void return_score_gradients();
  void write_grad_scores(const BackwardCall& call, bool owner_has_h3);
  void write_grad_x(const BackwardCall& call);

  /// One product of a step: rows of one expert, columns of its result.
  struct ProductTask {
    std::int64_t expert = 0;
    std::int64_t first_row = 0;
    std::int64_t num_rows = 0;
    std::int64_t first_column = 0;
    std::int64_t num_columns = 0;
  };
  void list_tasks(std::int64_t num_columns, std::int64_t columns_per_task);
  RowRange rows_of_expert(std::int64_t expert) const {
    return {expert, routing_.expert_begin(expert), routing_.expert_end(expert)};
  }
  /// Runs body(range, worker) for all rows, at most `grain` of one expert at a time, counted from
  /// its first.
  void run_rows(std::int64_t grain,
                const std::function<void(const RowRange& rows, int worker)>& body);

  Communicator& communicator() { return *setup_.communicator; }
  bool is_single() const { return setup_.size == 1; }

  BackendSetup setup_;
  ContextMemory memory_;
  ThreadPool pool_;
  std::vector<Workspace> workspaces_;  ///< one a worker
  std::int64_t capacity_rows_;         ///< rows that the plan has for a call, padding not counted

  std::span<CallHeader> headers_;
  MetadataSets metadata_sets_;
  CallMetadata metadata_;  ///< of this call
  std::vector<RankIds> ids_;
  Routing routing_;
  SlotStacks slots_;
  std::int64_t scratch_bytes_ = 0;  ///< of the last call
  RegionPeaks peaks_;               ///< of scratch
  bool is_recomputed_ = false;
  bool rows_have_h3_ = false;  ///< in a backward: h3 of this rank's rows was computed again
  // Of this forward, where it counts.
  std::optional<float> clip_limit_;
  std::atomic<std::int64_t> gates_clipped_{0};
  std::atomic<std::int64_t> ups_clipped_{0};
  // Of the last call that was routed.
  std::vector<std::int64_t> rows_per_rank_;
  std::vector<std::int64_t> rows_per_expert_;
  std::vector<ProductTask> tasks_;
  std::vector<RowRange> row_ranges_;
  // This call's regions, in scratch or in its slot.
  DenseRows x_;  ///< null where the rows are codes alone
  DenseRows h1_;
  DenseRows h2_;
  DenseRows h3_;       ///< in scratch, where it takes the place of an x_ that is not saved, or a
                       ///< buffer of its own
  DenseRows kept_x_;   ///< own rows of a call that recomputes or saves lean, else null
  DenseRows kept_h3_;  ///< [T * K] of a call that saves, else null
  // Of a backward, in scratch.
  DenseRows grad_h1_;  ///< over h2_ and grad_h3_
  DenseRows grad_h2_;
  DenseRows grad_h3_;
  DenseRows route_grad_;  ///< over an x_ in scratch, or grad_h3_
  // Codes of the block-scaled precisions: rows along themselves, which take turns in one region,
  // and across themselves, where a WGRAD needs them.
  CodedRows coded_x_;
  CodedRows coded_h2_;
  CodedRows coded_grad_h3_;
  CodedRows coded_grad_h1_;
  CodedColumns x_columns_;
  CodedColumns h2_columns_;
  CodedColumns grad_h3_columns_;
  CodedColumns grad_h1_columns_;
  /// [L * P] where the scores of the rows of an expert and a source are, from the row's number on.
  std::vector<std::int64_t> score_begin_;
  std::span<float> received_scores_;
};

}  // namespace distmoe::cpu
