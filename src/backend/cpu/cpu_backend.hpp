// SPDX-License-Identifier: Apache-2.0
//
// The backend that is the specification: plain C++, one rank's steps of a forward call on the
// worker threads of that rank. Each step has a file of its own.
#pragma once

#include <vector>

#include "backend/backend.hpp"
#include "backend/cpu/context_memory.hpp"
#include "backend/cpu/matmul.hpp"
#include "backend/cpu/routing.hpp"
#include "backend/cpu/thread_pool.hpp"
#include "layout/call_header.hpp"
#include "plan/layer_bytes.hpp"

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

  void publish(const ForwardCall& call, const std::optional<Error>& refusal) override;
  void route(const ForwardCall& call) override;
  void dispatch_w13_swiglu(const ForwardCall& call) override;
  void w2_scatter(const ForwardCall& call) override;
  void combine(const ForwardCall& call) override;

  void check() override {}
  RoutingLoad load() override;
  std::int64_t allocated_bytes() const override { return memory_.allocated_bytes(); }

 private:
  // publish.cpp
  void exchange_headers(const ForwardCall& call, const std::optional<Error>& refusal);
  void exchange_ids(const ForwardCall& call);
  // dispatch.cpp
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
  std::vector<RankIds> ids_;
  Routing routing_;
  std::vector<std::int64_t> rows_per_expert_;
  std::vector<ProductTask> tasks_;
  // This call's regions of scratch.
  DenseRows x_;
  DenseRows h1_;
  DenseRows h2_;
  DenseRows h3_;  ///< takes the place of x_
};

}  // namespace distmoe::cpu
