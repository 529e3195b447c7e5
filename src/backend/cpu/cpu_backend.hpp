// SPDX-License-Identifier: Apache-2.0
//
// The backend that is the specification: plain C++, one rank's steps of a forward call on the
// worker threads of that rank. Each step has a file of its own.
#pragma once

#include <vector>

#include "backend/backend.hpp"
#include "backend/cpu/call_metadata.hpp"
#include "backend/cpu/context_memory.hpp"
#include "backend/cpu/matmul.hpp"
#include "backend/cpu/routing.hpp"
#include "backend/cpu/thread_pool.hpp"
#include "layout/call_header.hpp"
#include "plan/layer_bytes.hpp"
#include "plan/slot_stacks.hpp"

namespace distmoe::cpu {

/// Rows of BF16 without gaps, in scratch or in a communication buffer.
struct DenseRows {
  BF16* data = nullptr;
  std::int64_t width = 0;
  BF16* row(std::int64_t index) const { return data + index * width; }
};

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(BackendSetup setup);
  const ContextMemory& memory() const { return memory_; }

  void publish(const ForwardCall& call, const std::optional<Error>& refusal) override;
  void route(const ForwardCall& call) override;
  void carve(const ForwardCall& call) override;
  void dispatch_w13_swiglu(const ForwardCall& call) override;
  void w2_scatter(const ForwardCall& call) override;
  void combine(const ForwardCall& call) override;
  void rewind(const SlotTicket& ticket) override;
  void reset_slots() override;
  RegionPeaks region_peaks() override;

  void check() override {}
  RoutingLoad load() override;
  std::int64_t allocated_bytes() const override { return memory_.allocated_bytes(); }

 private:
  void note_load();
  // publish.cpp
  void take_metadata(const ForwardCall& call);
  void exchange_headers(const ForwardCall& call, const std::optional<Error>& refusal);
  void exchange_ids(const ForwardCall& call);
  // carve.cpp
  void note_scratch(std::int64_t bytes);
  // dispatch.cpp
  void keep_own_rows(const ForwardCall& call);
  void exchange_rows(const ForwardCall& call);
  void exchange_scores(const ForwardCall& call);
  void gather_rows(const ForwardCall& call);
  // expert_products.cpp
  void w13_swiglu_task(const ForwardCall& call, std::int64_t task, int worker);
  void w2_task(const ForwardCall& call, std::int64_t task, int worker);
  // combine.cpp
  void return_rows();
  void return_partial_sums();
  void sum_routes(const ForwardCall& call);
  void sum_ranks(const ForwardCall& call);

  /// One product of a step: rows of one expert, columns of its result.
  struct ProductTask {
    std::int64_t expert = 0;
    std::int64_t first_row = 0;
    std::int64_t num_rows = 0;
    std::int64_t first_column = 0;
    std::int64_t num_columns = 0;
  };
  void list_tasks(std::int64_t num_columns, std::int64_t columns_per_task);

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
  RegionPeaks peaks_;  ///< of scratch
  bool is_recomputed_ = false;
  // Of the last call that was routed.
  std::vector<std::int64_t> rows_per_rank_;
  std::vector<std::int64_t> rows_per_expert_;
  std::vector<ProductTask> tasks_;
  // This call's regions, in scratch or in its slot.
  DenseRows x_;
  DenseRows h1_;
  DenseRows h2_;
  DenseRows h3_;       ///< in scratch, where it takes the place of an x_ that is not saved
  DenseRows kept_x_;   ///< own rows of a call that recomputes or saves lean, else null
  DenseRows kept_h3_;  ///< [T * K] of a call that saves, else null
};

}  // namespace distmoe::cpu
