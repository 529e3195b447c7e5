// SPDX-License-Identifier: Apache-2.0
//
// The calls of one row on one rank: a context, sets of tensors in the device's memory, the timing
// of some or all steps of a call, and the check of what was timed.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "bench/bench_case.hpp"
#include "bench/bench_device.hpp"
#include "bench/layer_values.hpp"
#include "comparison.hpp"
#include "distmoe/context.hpp"
#include "distmoe/routed_experts.hpp"
#include "rank_group.hpp"
#include "runtime/forward.hpp"

namespace distmoe::tools {

/// The weights of this rank's experts of one shape, `num_copies` of them.
class BenchWeights {
 public:
  BenchWeights(BenchDevice& device, const LayerValues& values, std::int64_t first_expert,
               std::int64_t num_experts, int num_copies);
  const ExpertWeights& copy(int index) const { return copies_[static_cast<std::size_t>(index)]; }

 private:
  std::vector<ExpertWeights> copies_;
};

/// Runs `lap(is_timed)` and returns what its marks, set where it is timed, lie apart in
/// microseconds.
double time_lap(BenchDevice& device, const std::function<void(bool is_timed)>& lap);

struct CallCheck {
  ComparisonSums sums;   ///< sampled tokens of this rank
  bool is_equal = true;  ///< the timed call and an untimed one, all tokens
};

class BenchCall {
 public:
  BenchCall(BenchDevice& device, const BenchCase& row, const BenchOptions& options,
            RankGroup& group)
      : device_(device), case_(row), options_(options), group_(group) {}

  /// Collective.
  void create_context(int device_ordinal);
  /// Local. `values` and `weights` outlive this object.
  void place_tensors(const LayerValues& values, const BenchWeights& weights);
  const Context& context() const { return *context_; }

  /// Collective: one measurement, in microseconds. Sets take turns.
  double time();
  /// Collective. What the last timed call left is compared with a plain computation of a few
  /// tokens, and bit by bit with an untimed call on an output full of NaN.
  CallCheck check();

 private:
  struct TensorSet {
    RoutedInput input;
    ExpertWeights weights;
    TensorView y;
    std::unique_ptr<Workload> graph;
  };
  void add_set(int index, const BenchWeights& weights);
  void call(const TensorSet& set, void* stream, const StepObserver* observer);
  StepObserver marks_of(void* stream) const;
  void run_lap(TensorSet& set, bool is_timed);
  std::vector<std::byte> output_of(const TensorSet& set) const;
  void compare_samples(std::span<const std::byte> y, ComparisonSums& sums) const;

  BenchDevice& device_;
  const BenchCase& case_;
  const BenchOptions& options_;
  RankGroup& group_;
  const LayerValues* values_ = nullptr;
  std::unique_ptr<Context> context_;
  std::vector<TensorSet> sets_;
  std::size_t num_laps_ = 0;
};

}  // namespace distmoe::tools
