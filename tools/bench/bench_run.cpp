// SPDX-License-Identifier: Apache-2.0
#include "bench/bench_run.hpp"

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/bench_device.hpp"
#include "bench/bench_report.hpp"
#include "bench/bench_rows.hpp"
#include "bench/bench_series.hpp"
#include "bench/bench_summary.hpp"
#include "bench/torch_peers.hpp"
#include "core/check.hpp"
#include "progress.hpp"
#include "rank_group.hpp"
#include "rank_launch.hpp"
#include "runtime/cores.hpp"
#include "standard_output.hpp"

namespace distmoe::tools {
namespace {

/// Rounds of a row whose samples do not count.
constexpr int kWarmUpRounds = 3;

/// Where the samples of a row are.
struct RowSeries {
  std::size_t begin = 0;  ///< its series are those in [begin, end)
  std::size_t end = 0;
  std::size_t time = 0;
  std::size_t forward = 0;  ///< of a mode that trains, like backward
  std::size_t backward = 0;
  std::size_t restore = 0;
  std::size_t bound = 0;
  std::vector<std::size_t> steps;  ///< of --steps
  std::vector<std::size_t> peers;
};

class BenchRun {
 public:
  BenchRun(const BenchOptions& options, std::shared_ptr<Communicator> communicator,
           SharedLayerValues& values)
      : options_(options),
        group_(std::move(communicator), options.timeout),
        progress_(group_.is_first()),
        rows_(options_, group_, progress_, values, num_calls(options)) {}

  ExitCode run();
  void clear() { progress_.clear(); }

 private:
  using MakeCeiling = std::function<std::optional<Ceiling>(std::string& why_not)>;

  static int num_calls(const BenchOptions& options) {
    return (options.rounds + kWarmUpRounds) * (options.steps ? 2 : 1);
  }
  bool is_training() const { return options_.mode == BenchMode::kTrain; }

  void prepare_series();
  void add_ceilings();
  void add_row_series(std::size_t index);
  void add_peers();
  void measure_row(std::size_t index);
  BenchRow summarize(std::size_t index, const CallCheck& check);
  Failure print_row(const BenchRow& row);
  Failure print_end();

  std::size_t add_series(std::function<double()> measure);
  std::size_t add_ceiling(const char* what, const MakeCeiling& make);
  std::optional<Ceiling> dense_layer_of(const RowCall& row, std::string& why_not);
  double time_peer(std::size_t row, std::size_t peer);
  std::int64_t num_measurements() const;
  Samples slowest(std::size_t series) { return group_.largest(series_[series].samples); }
  RowSamples samples_of(const RowSeries& series);

  const BenchOptions& options_;
  RankGroup group_;
  Progress progress_;
  BenchRows rows_;
  std::unique_ptr<TorchPeers> torch_;
  std::deque<Ceiling> ceilings_;
  std::vector<BenchSeries> series_;
  std::vector<RowSeries> row_series_;
  std::size_t num_ceiling_series_ = 0;  ///< the first ones: they are measured beside every row
  std::size_t dense_series_ = 0;
  std::size_t copy_series_ = 0;
  std::size_t read_series_ = 0;
  std::size_t write_series_ = 0;
  std::size_t link_series_ = 0;
  std::size_t overhead_series_ = 0;
  std::vector<double> step_times_;  ///< of the last call whose steps were marked
  std::vector<std::string> peer_names_;
  BenchReport report_;
  std::int64_t num_done_ = 0;
};

std::size_t BenchRun::add_series(std::function<double()> measure) {
  series_.push_back({std::move(measure), {}});
  return series_.size() - 1;
}

std::size_t BenchRun::add_ceiling(const char* what, const MakeCeiling& make) {
  std::string why_not;
  std::optional<Ceiling> ceiling = make(why_not);
  if (!why_not.empty()) report_.missing.push_back(concat(what, ": ", why_not));
  if (!ceiling || !rows_.sharing().is_leader(group_.rank())) return add_series(nullptr);
  const Ceiling& kept = ceilings_.emplace_back(std::move(*ceiling));
  return add_series([this, &kept] { return us_per_work(rows_.device(), kept); });
}

std::optional<Ceiling> BenchRun::dense_layer_of(const RowCall& row, std::string& why_not) {
  const ExpertWeights& weights = row.weights->plain();
  return rows_.device().dense_layer({.num_rows = row.plan.num_tokens * row.plan.shape.top_k,
                                     .num_experts = row.call->context().num_local_experts(),
                                     .hidden_dim = row.plan.shape.hidden_dim,
                                     .intermediate_dim = row.plan.shape.intermediate_dim,
                                     .w13 = weights.w13_L2FD.data,
                                     .w2 = weights.w2_LDF.data},
                                    why_not);
}

void BenchRun::add_ceilings() {
  BenchDevice& device = rows_.device();
  const bool is_leader = rows_.sharing().is_leader(group_.rank());
  const auto led = [is_leader](auto make) -> MakeCeiling {
    return [is_leader, make](std::string& why_not) {
      return is_leader ? std::optional<Ceiling>(make(why_not)) : std::nullopt;
    };
  };
  dense_series_ = add_ceiling(
      "dense products", led([&](std::string& why_not) { return device.dense_product(why_not); }));
  copy_series_ =
      add_ceiling("memory", led([&](std::string&) { return std::optional(device.memory_copy()); }));
  read_series_ =
      add_ceiling("memory", led([&](std::string&) { return std::optional(device.memory_read()); }));
  write_series_ = add_ceiling(
      "memory", led([&](std::string&) { return std::optional(device.memory_write()); }));
  link_series_ = add_ceiling("link", [&](std::string& why_not) -> std::optional<Ceiling> {
    if (rows_.sharing().leaders.size() < 2) return std::nullopt;
    return device.link_read(group_, rows_.sharing().leaders, why_not);
  });
  overhead_series_ = add_series([&device] {
    return time_lap(device, [&](bool is_timed) {
      if (!is_timed) return;
      for (auto mark = TimeMark::kBegin; mark <= TimeMark::kEnd; mark = next_of(mark)) {
        device.mark(mark, device.stream());
      }
    });
  });
}

void BenchRun::add_row_series(std::size_t index) {
  RowCall& row = rows_.rows()[index];
  RowSeries& series = row_series_[index];
  series.begin = series_.size();
  series.time = add_series([&row] { return row.call->time(); });
  if (is_training()) {
    series.forward = add_series([&row] { return row.call->forward_us(); });
    series.backward = add_series([&row] { return row.call->backward_us(); });
    series.restore = add_series([&row] { return row.call->restore_us(); });
  }
  series.bound = add_ceiling("bound", [&](std::string& why_not) -> std::optional<Ceiling> {
    if (!rows_.sharing().is_leader(group_.rank())) return std::nullopt;
    return dense_layer_of(row, why_not);
  });
  for (std::size_t peer = 0; peer < peer_names_.size(); ++peer) {
    series.peers.push_back(add_series([this, index, peer] { return time_peer(index, peer); }));
  }
  const std::size_t num_steps = options_.steps ? row.call->step_names().size() : 0;
  for (std::size_t step = 0; step < num_steps; ++step) {
    series.steps.push_back(add_series([this, &row, step] {
      if (step == 0) step_times_ = row.call->time_steps().us;
      return step_times_[step + 1] - step_times_[step];
    }));
  }
  series.end = series_.size();
}

/// A peer that cannot be had is named in the report, not an error.
void BenchRun::add_peers() {
  if (!options_.peers) return;
  if (group_.size() > 1) {
    report_.missing.emplace_back("PyTorch: its layers here are of one rank");
    return;
  }
  const bool is_whole = options_.mode == BenchMode::kForward || is_training();
  if (!is_whole) {
    report_.missing.emplace_back("PyTorch: its layers here are whole calls");
    return;
  }
  progress_.show("starting PyTorch");
  const Failure failure = attempt([&] {
    auto torch = std::make_unique<TorchPeers>(options_.python, options_.backend,
                                              cores_of_this_process().num_cores, options_.timeout);
    for (std::size_t i = 0; i < rows_.rows().size(); ++i) {
      const BenchCase& plan = rows_.rows()[i].plan;
      progress_.show("making layers of PyTorch", static_cast<std::int64_t>(i + 1),
                     std::ssize(rows_.rows()));
      torch->add_layer(i, plan, is_training());
      // The first call compiles and chooses kernels; what it cannot do it says here.
      for (std::size_t peer = 0; peer < torch->names().size(); ++peer) torch->time(i, peer);
    }
    torch_ = std::move(torch);
    peer_names_ = torch_->names();
    report_.torch = torch_->version();
  });
  if (failure.happened()) report_.missing.push_back("PyTorch: " + failure.message);
}

/// 0 once PyTorch failed: from then on it is no peer any more.
double BenchRun::time_peer(std::size_t row, std::size_t peer) {
  if (!torch_) return 0.0;
  double us = 0.0;
  const Failure failure = attempt([&] { us = torch_->time(row, peer); });
  if (failure.happened()) {
    report_.missing.push_back("PyTorch: " + failure.message);
    torch_.reset();
  }
  return us;
}

void BenchRun::prepare_series() {
  progress_.show("preparing ceilings");
  report_ = report_of(options_, group_.size());
  report_.machine = rows_.device().name();
  add_ceilings();
  num_ceiling_series_ = series_.size();
  add_peers();
  row_series_.resize(rows_.rows().size());
  for (std::size_t i = 0; i < rows_.rows().size(); ++i) add_row_series(i);
}

std::int64_t BenchRun::num_measurements() const {
  std::int64_t num_series = 0;
  for (const RowSeries& row : row_series_) {
    num_series += static_cast<std::int64_t>(num_ceiling_series_ + row.end - row.begin);
  }
  return num_series * (options_.rounds + kWarmUpRounds);
}

void BenchRun::measure_row(std::size_t index) {
  const RowSeries& row = row_series_[index];
  for (std::size_t i = 0; i < num_ceiling_series_; ++i) series_[i].samples.clear();
  for (int round = 0; round < options_.rounds + kWarmUpRounds; ++round) {
    const auto measure = [&](BenchSeries& series) {
      progress_.show("measuring", ++num_done_, num_measurements());
      // Every rank waits here for the others: a measurement has the machine to itself.
      group_.barrier();
      const double sample = series.measure ? series.measure() : 0.0;
      if (round >= kWarmUpRounds) series.samples.push_back(sample);
    };
    for (std::size_t i = 0; i < num_ceiling_series_; ++i) measure(series_[i]);
    for (std::size_t i = row.begin; i < row.end; ++i) measure(series_[i]);
  }
}

RowSamples BenchRun::samples_of(const RowSeries& series) {
  RowSamples samples{.us = slowest(series.time), .bound = slowest(series.bound)};
  if (is_training()) {
    samples.forward = slowest(series.forward);
    samples.backward = slowest(series.backward);
    samples.restore = slowest(series.restore);
  }
  for (const std::size_t step : series.steps) samples.steps.push_back(slowest(step));
  // A peer that failed has no times: its reason is in the report.
  for (std::size_t p = 0; torch_ && p < series.peers.size(); ++p) {
    samples.peers.push_back(slowest(series.peers[p]));
  }
  return samples;
}

BenchRow BenchRun::summarize(std::size_t index, const CallCheck& check) {
  const RowCall& row = rows_.rows()[index];
  const MachineRates rates =
      rates_of({slowest(dense_series_), slowest(copy_series_), slowest(read_series_),
                slowest(write_series_), slowest(link_series_)});
  BenchRow summary = summarize_row(row.plan, options_.mode, samples_of(row_series_[index]), check,
                                   rates, rows_.sharing().ranks_per_device);
  summary.overhead_us = spread_of(slowest(overhead_series_)).median;
  summary.plan = row.call->context().memory_plan();
  const std::vector<const char*> steps = row.call->step_names();
  for (std::size_t s = 0; s < summary.steps.size(); ++s) summary.steps[s].name = steps[s];
  for (std::size_t p = 0; p < summary.peers.size(); ++p) summary.peers[p].name = peer_names_[p];
  return summary;
}

/// As soon as it is known: what ends a run keeps the rows before.
Failure BenchRun::print_row(const BenchRow& row) {
  if (!group_.is_first() || !options_.json) return {};
  return attempt([&] {
    progress_.clear();
    write_stdout(json_of(report_, row));
  });
}

Failure BenchRun::print_end() {
  if (!group_.is_first() || options_.json || report_.rows.empty()) return {};
  return attempt([&] {
    progress_.clear();
    write_stdout(text_of(report_));
  });
}

ExitCode BenchRun::run() {
  Failure failure = rows_.set_up();
  if (!failure.happened()) prepare_series();
  for (std::size_t i = 0; !failure.happened() && i < rows_.rows().size(); ++i) {
    failure = attempt_together(is_known_to_all_callers, [&] {
      measure_row(i);
      report_.rows.push_back(summarize(i, rows_.rows()[i].call->check()));
    });
    if (!failure.happened()) failure = group_.agree(print_row(report_.rows.back()));
  }
  Failure own = print_end();
  if (!failure.happened()) {
    if (!own.happened()) own = judge(report_);
    failure = group_.agree(own);
  }
  clear();
  return leave_together(group_, failure);
}

}  // namespace

RankOutcome run_bench_rank(const BenchOptions& options,
                           const std::shared_ptr<Communicator>& communicator,
                           SharedLayerValues& values) {
  BenchRun run(options, communicator, values);
  return run_rank_steps(
      *communicator, [&] { return run.run(); }, [&] { run.clear(); });
}

}  // namespace distmoe::tools
