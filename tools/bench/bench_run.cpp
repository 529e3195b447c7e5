// SPDX-License-Identifier: Apache-2.0
#include "bench/bench_run.hpp"

#include <algorithm>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "bench/bench_call.hpp"
#include "bench/bench_case.hpp"
#include "bench/bench_device.hpp"
#include "bench/bench_report.hpp"
#include "bench/bench_series.hpp"
#include "bench/bench_summary.hpp"
#include "core/check.hpp"
#include "progress.hpp"
#include "rank_group.hpp"
#include "standard_output.hpp"

namespace distmoe::tools {
namespace {

/// Rounds whose samples do not count.
constexpr int kWarmUpRounds = 3;

/// A row of the table on this rank.
struct RowRun {
  BenchCase plan;
  std::shared_ptr<const LayerValues> values;
  std::unique_ptr<BenchCall> call;
  std::size_t time_series = 0;
  std::size_t forward_series = 0;  ///< of a mode that trains, like backward_series
  std::size_t backward_series = 0;
  std::size_t restore_series = 0;
  std::size_t bound_series = 0;
};

/// What every rank tells of its device before anything is planned.
struct DeviceFacts {
  std::uint64_t identity = 0;
  std::int64_t cache_bytes = 0;
};

class BenchRun {
 public:
  BenchRun(const BenchOptions& options, std::shared_ptr<Communicator> communicator,
           SharedLayerValues& values)
      : options_(options),
        values_(values),
        group_(std::move(communicator), options.timeout),
        progress_(group_.is_first()) {}

  RankGroup& group() noexcept { return group_; }

  // The steps of a run, in order. prepare(), plan_rows() and place_tensors() may fail on one rank
  // alone: the ranks agree after them.
  void prepare();
  std::string settings() const;
  void meet();
  void plan_rows();
  void create_contexts();
  void place_tensors();
  void make_ceilings();
  void measure();
  void check_outputs();
  Failure report();
  void clear() { progress_.clear(); }

 private:
  using MakeCeiling = std::function<std::optional<Ceiling>(std::string& why_not)>;

  int ordinal() const { return device_of_rank(options_.rank_setup(), group_.rank()); }
  std::size_t add_series(std::function<double()> measure);
  std::size_t add_ceiling(const char* what, const MakeCeiling& make);
  std::optional<Ceiling> dense_layer_of(const RowRun& row, std::string& why_not);
  BenchReport make_report(const std::vector<Samples>& slowest,
                          const std::vector<CallCheck>& checks) const;

  const BenchOptions& options_;
  SharedLayerValues& values_;
  RankGroup group_;
  Progress progress_;

  std::optional<CapturedRouting> captured_;
  std::unique_ptr<BenchDevice> device_;
  DeviceSharing sharing_;
  std::int64_t cache_bytes_ = 0;
  std::vector<RowRun> rows_;
  std::deque<BenchWeights> weights_;  ///< one a shape
  std::deque<Ceiling> ceilings_;
  std::vector<BenchSeries> series_;
  std::size_t dense_series_ = 0;
  std::size_t copy_series_ = 0;
  std::size_t read_series_ = 0;
  std::size_t link_series_ = 0;
  std::vector<std::string> missing_;
  std::vector<CallCheck> checks_;
};

void BenchRun::prepare() {
  DISTMOE_CHECK(!options_.ranks || *options_.ranks == group_.size(), kInvalidArgument,
                "--ranks is ", options_.ranks.value_or(0), ", but the launcher started ",
                group_.size(), " ranks");
  if (options_.routing == RoutingKind::kCaptured) {
    captured_ = CapturedRouting::open(options_.routing_file, options_.routing_layer);
  }
  device_ = options_.backend == BackendKind::kCuda ? make_cuda_bench_device(ordinal())
                                                   : make_cpu_bench_device();
}

// All that must be the same on every rank.
std::string BenchRun::settings() const {
  std::string text =
      concat(to_string(options_.backend), " --mode ", to_string(options_.mode), " --rounds ",
             options_.rounds, options_.graph ? " --graph" : "", " --routing ",
             options_.routing_text(), " ", options_.routing_layer, " --combine ",
             static_cast<int>(options_.combine), " --sms ", options_.num_sms.value_or(0),
             " --activation-policy ", static_cast<int>(options_.activation_policy),
             options_.recompute ? " --recompute" : "", " --tokens");
  for (const std::int64_t tokens : options_.tokens) text += concat(" ", tokens);
  for (const BenchShape& shape : options_.shapes) text += " --shape " + shape.name;
  return text;
}

void BenchRun::meet() {
  std::vector<std::uint64_t> identities;
  for (const DeviceFacts& facts :
       group_.all_gather(DeviceFacts{device_->identity(), device_->cache_bytes()})) {
    identities.push_back(facts.identity);
    cache_bytes_ = std::max(cache_bytes_, facts.cache_bytes);
  }
  sharing_ = device_sharing(identities);
}

void BenchRun::plan_rows() {
  progress_.show("planning");
  const int laps_per_round = device_->is_asynchronous() ? 2 : 1;
  const BenchSetting setting{.options = options_,
                             .rank = group_.rank(),
                             .num_ranks = group_.size(),
                             .cache_bytes = cache_bytes_,
                             .num_laps = (options_.rounds + kWarmUpRounds) * laps_per_round,
                             .captured = captured_ ? &*captured_ : nullptr};
  for (const BenchShape& shape : options_.shapes) {
    for (const std::int64_t tokens : options_.tokens) {
      rows_.push_back({.plan = make_bench_case(shape, tokens, setting),
                       .values = values_.of(shape),
                       .call = nullptr});
    }
  }
  for (RowRun& row : rows_) {
    row.call = std::make_unique<BenchCall>(*device_, row.plan, options_, group_);
  }
}

void BenchRun::create_contexts() {
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    progress_.show("creating contexts", static_cast<std::int64_t>(i + 1), std::ssize(rows_));
    rows_[i].call->create_context(ordinal());
  }
}

void BenchRun::place_tensors() {
  const std::size_t rows_per_shape = options_.tokens.size();
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    progress_.show("filling tensors", static_cast<std::int64_t>(i + 1), std::ssize(rows_));
    const RowRun& row = rows_[i];
    if (i % rows_per_shape == 0) {
      int num_copies = 1;
      for (std::size_t j = i; j < i + rows_per_shape; ++j) {
        num_copies = std::max(num_copies, rows_[j].plan.num_weight_copies);
      }
      weights_.emplace_back(*device_, *row.values, row.call->context().first_expert(),
                            row.call->context().num_local_experts(), num_copies);
    }
    row.call->place_tensors(*row.values, weights_.back());
  }
}

std::size_t BenchRun::add_series(std::function<double()> measure) {
  series_.push_back({std::move(measure), {}});
  return series_.size() - 1;
}

std::size_t BenchRun::add_ceiling(const char* what, const MakeCeiling& make) {
  std::string why_not;
  std::optional<Ceiling> ceiling = make(why_not);
  if (!why_not.empty()) missing_.push_back(concat(what, ": ", why_not));
  if (!ceiling || !sharing_.is_leader(group_.rank())) return add_series(nullptr);
  const Ceiling& kept = ceilings_.emplace_back(std::move(*ceiling));
  return add_series([this, &kept] { return us_per_work(*device_, kept); });
}

std::optional<Ceiling> BenchRun::dense_layer_of(const RowRun& row, std::string& why_not) {
  const std::size_t shape = static_cast<std::size_t>(&row - rows_.data()) / options_.tokens.size();
  const ExpertWeights& weights = weights_[shape].copy(0);
  return device_->dense_layer({.num_rows = row.plan.num_tokens * row.plan.shape.top_k,
                               .num_experts = row.call->context().num_local_experts(),
                               .hidden_dim = row.plan.shape.hidden_dim,
                               .intermediate_dim = row.plan.shape.intermediate_dim,
                               .w13 = weights.w13_L2FD.data,
                               .w2 = weights.w2_LDF.data},
                              why_not);
}

void BenchRun::make_ceilings() {
  progress_.show("preparing ceilings");
  const bool is_leader = sharing_.is_leader(group_.rank());
  const auto led = [is_leader](auto make) -> MakeCeiling {
    return [is_leader, make](std::string& why_not) {
      return is_leader ? std::optional<Ceiling>(make(why_not)) : std::nullopt;
    };
  };
  dense_series_ =
      add_ceiling("dense products",
                  led([this](std::string& why_not) { return device_->dense_product(why_not); }));
  copy_series_ = add_ceiling(
      "memory", led([this](std::string&) { return std::optional(device_->memory_copy()); }));
  read_series_ = add_ceiling(
      "memory", led([this](std::string&) { return std::optional(device_->memory_read()); }));
  link_series_ = add_ceiling("link", [this](std::string& why_not) -> std::optional<Ceiling> {
    if (sharing_.leaders.size() < 2) return std::nullopt;
    return device_->link_read(group_, sharing_.leaders, why_not);
  });
  for (RowRun& row : rows_) {
    row.time_series = add_series([&row] { return row.call->time(); });
    if (options_.mode == BenchMode::kTrain) {
      row.forward_series = add_series([&row] { return row.call->forward_us(); });
      row.backward_series = add_series([&row] { return row.call->backward_us(); });
      row.restore_series = add_series([&row] { return row.call->restore_us(); });
    }
    row.bound_series = add_ceiling(
        "bound", led([this, &row](std::string& why_not) { return dense_layer_of(row, why_not); }));
  }
}

void BenchRun::measure() {
  const int num_rounds = options_.rounds + kWarmUpRounds;
  for (int round = 0; round < num_rounds; ++round) {
    for (std::size_t i = 0; i < series_.size(); ++i) {
      progress_.show(concat("round ", round + 1, "/", num_rounds, ", measurement"),
                     static_cast<std::int64_t>(i + 1), std::ssize(series_));
      // Every rank waits here for the others: a measurement has the machine to itself.
      group_.barrier();
      BenchSeries& series = series_[i];
      const double sample = series.measure ? series.measure() : 0.0;
      if (round >= kWarmUpRounds) series.samples.push_back(sample);
    }
  }
}

void BenchRun::check_outputs() {
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    progress_.show("checking outputs", static_cast<std::int64_t>(i + 1), std::ssize(rows_));
    checks_.push_back(rows_[i].call->check());
  }
}

Failure BenchRun::report() {
  std::vector<Samples> slowest;
  const auto num_rounds = static_cast<std::size_t>(options_.rounds);
  for (const BenchSeries& series : series_) {
    std::vector<double> samples(num_rounds * static_cast<std::size_t>(group_.size()));
    group_.all_gather_bytes(std::as_bytes(std::span(series.samples)),
                            std::as_writable_bytes(std::span(samples)));
    slowest.push_back(slowest_of(samples, num_rounds));
  }
  std::vector<CallCheck> checks;
  for (const CallCheck& own : checks_) {
    CallCheck all;
    for (const CallCheck& rank : group_.all_gather(own)) {
      all.merge(rank);
    }
    checks.push_back(all);
  }
  if (!group_.is_first()) return {};
  Failure failure;
  const Failure unprinted = attempt([&] {
    const BenchReport report = make_report(slowest, checks);
    progress_.clear();
    write_stdout(options_.json ? json_of(report) : text_of(report));
    failure = judge(report);
  });
  return unprinted.happened() ? unprinted : failure;
}

BenchReport BenchRun::make_report(const std::vector<Samples>& slowest,
                                  const std::vector<CallCheck>& checks) const {
  const MachineRates rates = rates_of({slowest[dense_series_], slowest[copy_series_],
                                       slowest[read_series_], slowest[link_series_]});
  BenchReport report{.ranks = group_.size(),
                     .engine = to_string(options_.engine),
                     .backend = to_string(options_.backend),
                     .mode = to_string(options_.mode),
                     .routing = options_.routing_text(),
                     .combine = options_.combine == Combine::kPerRoute ? "per_route" : "per_rank",
                     .activation_policy = {},
                     .recompute = {},
                     .graph = options_.graph,
                     .rounds = options_.rounds,
                     .tolerance = options_.tolerance,
                     .machine = device_->name(),
                     .missing = missing_,
                     .ceilings = ceilings_of(rates),
                     .rows = {}};
  if (options_.mode == BenchMode::kTrain) {
    report.activation_policy =
        options_.activation_policy == ActivationPolicy::kFull ? "full" : "lean";
    report.recompute = options_.recompute;
  }
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const RowRun& row = rows_[i];
    RowSamples samples{.us = slowest[row.time_series], .bound = slowest[row.bound_series]};
    if (options_.mode == BenchMode::kTrain) {
      samples.forward = slowest[row.forward_series];
      samples.backward = slowest[row.backward_series];
      samples.restore = slowest[row.restore_series];
    }
    report.rows.push_back(summarize_row(row.plan, options_.mode, samples, checks[i], rates,
                                        sharing_.ranks_per_device));
  }
  return report;
}

Failure set_up(BenchRun& run) {
  Failure failure = run.group().agree(attempt([&] { run.prepare(); }));
  if (!failure.happened()) failure = run.group().find_difference(run.settings());
  if (failure.happened()) return failure;
  run.meet();
  failure = run.group().agree(attempt([&] { run.plan_rows(); }));
  if (!failure.happened()) {
    failure = attempt_together(is_known_to_all_creators, [&] { run.create_contexts(); });
  }
  if (failure.happened()) return failure;
  failure = run.group().agree(attempt([&] { run.place_tensors(); }));
  if (!failure.happened()) run.make_ceilings();
  return failure;
}

ExitCode run_steps(BenchRun& run) {
  Failure failure = set_up(run);
  if (!failure.happened()) {
    failure = attempt_together(is_known_to_all_callers, [&] {
      run.measure();
      run.check_outputs();
    });
  }
  if (!failure.happened()) failure = run.group().agree(run.report());
  if (run.group().is_first()) {
    run.clear();
    if (failure.happened()) print_error(failure.message);
  }
  // NOTE: mpirun ends all processes once one has failed, so nobody leaves before the first rank
  // has said everything.
  run.group().barrier();
  return failure.exit_code;
}

}  // namespace

RankOutcome run_bench_rank(const BenchOptions& options,
                           const std::shared_ptr<Communicator>& communicator,
                           SharedLayerValues& values) {
  BenchRun run(options, communicator, values);
  return run_rank_steps(
      *communicator, [&] { return run_steps(run); }, [&] { run.clear(); });
}

}  // namespace distmoe::tools
