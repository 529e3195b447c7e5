// SPDX-License-Identifier: Apache-2.0
//
// The calls of one row on one rank: a context, sets of tensors in the device's memory, the timing
// of some or all steps of a call, and the check of what was timed.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "bench/bench_case.hpp"
#include "bench/bench_device.hpp"
#include "bench/layer_values.hpp"
#include "comparison.hpp"
#include "digest.hpp"
#include "distmoe/context.hpp"
#include "distmoe/prepared_weight.hpp"
#include "distmoe/routed_experts.hpp"
#include "distmoe/routed_experts_backward.hpp"
#include "rank_group.hpp"
#include "runtime/backward.hpp"
#include "runtime/forward.hpp"

namespace distmoe::tools {

/// The weights of this rank's experts of one shape as a context takes them: BF16, or codes that are
/// prepared once.
class BenchWeights {
 public:
  /// `num_copies` of them.
  BenchWeights(BenchDevice& device, const LayerValues& values, const Context& context,
               int num_copies);
  const ExpertWeights& copy(int index) const { return copies_[static_cast<std::size_t>(index)]; }
  /// In BF16.
  const ExpertWeights& plain() const { return plain_; }

 private:
  ExpertWeights plain_;
  std::vector<ExpertWeights> copies_;
  std::vector<PreparedWeight> prepared_;  ///< of every copy W13's and W2's
};

/// Runs `lap(is_timed)` and returns what its marks, set where it is timed, lie apart in
/// microseconds.
double time_lap(BenchDevice& device, const std::function<void(bool is_timed)>& lap);

/// Of a timed call, sampled tokens of every rank.
struct CallCheck {
  ComparisonSums y;
  ComparisonSums grad_x;
  ComparisonSums grad_scores;
  bool is_equal = true;  ///< the timed call and an untimed one, all that they wrote

  void merge(const CallCheck& other);
  /// The largest relative distance.
  double rel_l2() const;
};

/// When the steps of a call began and the last one ended: one more than there are names.
struct StepTimes {
  std::int64_t begin_ns = 0;  ///< of the call, on this machine's monotonic clock
  std::vector<double> us;     ///< after that
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
  /// The parts of the last measurement of a forward and its backward, and of that the restoring of
  /// activations.
  double forward_us() const { return device_.elapsed_us(TimeMark::kBegin, TimeMark::kMiddle); }
  double backward_us() const { return device_.elapsed_us(TimeMark::kMiddle, TimeMark::kEnd); }
  double restore_us() const { return device_.elapsed_us(TimeMark::kRestore, TimeMark::kRestored); }
  /// The steps of a whole call: of a forward, or of a forward and its backward.
  std::vector<const char*> step_names() const;
  /// Collective: one call whose steps are marked.
  StepTimes time_steps();
  /// Collective. What the last timed call left is compared with a plain computation of a few
  /// tokens, and bit by bit with an untimed call on outputs full of NaN; of all ranks together.
  CallCheck check();

 private:
  struct TensorSet {
    RoutedInput input;
    ExpertWeights weights;
    TensorView y;
    TensorView dy;  ///< given where the call trains, like the gradients
    RoutedGradients gradients;
    std::unique_ptr<Workload> graph;

    std::vector<TensorView> outputs() const;
  };
  /// Told of the steps of a call; empty members: nobody watches.
  struct StepWatch {
    StepObserver forward;
    BackwardStepObserver backward;
  };
  void add_set(int index, const BenchWeights& weights);
  void add_gradients(int index, TensorSet& set);
  void train(const TensorSet& set, void* stream, const StepWatch& watch);
  void call(const TensorSet& set, void* stream, const StepObserver* observer);
  StepObserver marks_of(void* stream) const;
  StepWatch watch_steps(void* stream) const;
  void run_lap(TensorSet& set, bool is_timed);
  bool is_training() const { return options_.mode == BenchMode::kTrain; }
  /// One call, its inner marks set where `marks_steps`.
  void enqueue(const TensorSet& set, void* stream, bool marks_steps);
  TensorView place_output(DType dtype, std::initializer_list<std::int64_t> shape);
  std::vector<Digest> digests_of(const TensorSet& set) const;
  void compare_samples(const TensorSet& set, CallCheck& check) const;

  BenchDevice& device_;
  const BenchCase& case_;
  const BenchOptions& options_;
  RankGroup& group_;
  const LayerValues* values_ = nullptr;
  std::unique_ptr<Context> context_;
  std::vector<TensorSet> sets_;
  std::vector<std::pair<TensorView, TensorView>>
      weight_gradients_;  ///< W13's and W2's, a copy each
  std::size_t num_laps_ = 0;
};

}  // namespace distmoe::tools
