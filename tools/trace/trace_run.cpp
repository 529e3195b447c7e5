// SPDX-License-Identifier: Apache-2.0
#include "trace/trace_run.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bench/bench_rows.hpp"
#include "core/check.hpp"
#include "destination.hpp"
#include "distmoe/version.hpp"
#include "progress.hpp"
#include "rank_group.hpp"
#include "runtime/cores.hpp"
#include "standard_output.hpp"
#include "trace/trace_events.hpp"

namespace distmoe::tools {
namespace {

/// When a rank began, for the others.
struct RankBegin {
  std::int64_t clock_ns = 0;  ///< of the machine's monotonic clock
  std::uint64_t machine = 0;  ///< ranks of one machine share that clock
  std::int64_t rows = 0;
};

/// Places the ranks on one axis: by the clock where all share one, else at the barrier that they
/// left together.
std::vector<double> begins_of(std::span<const RankBegin> ranks) {
  const auto first = std::ranges::min(ranks, {}, &RankBegin::clock_ns).clock_ns;
  const bool is_one_machine = std::ranges::all_of(
      ranks, [&](const RankBegin& rank) { return rank.machine == ranks.front().machine; });
  std::vector<double> begins;
  for (const RankBegin& rank : ranks) {
    begins.push_back(is_one_machine ? 1e-3 * static_cast<double>(rank.clock_ns - first) : 0.0);
  }
  return begins;
}

class TraceRun {
 public:
  TraceRun(const BenchOptions& options, const std::filesystem::path& output,
           std::shared_ptr<Communicator> communicator, SharedLayerValues& values)
      : options_(options),
        output_(output),
        group_(std::move(communicator), options.timeout),
        progress_(group_.is_first()),
        rows_(options_, group_, progress_, values, options.rounds + 1) {}

  ExitCode run();
  void clear() { progress_.clear(); }

 private:
  BenchCall& call() { return *rows_.rows().front().call; }
  void make_calls();
  TraceFile gather();
  void write(const TraceFile& trace);

  const BenchOptions& options_;
  const std::filesystem::path& output_;
  RankGroup group_;
  Progress progress_;
  BenchRows rows_;
  RankBegin begin_;
  std::vector<double> step_us_;
};

void TraceRun::make_calls() {
  for (int round = 0; round < options_.rounds; ++round) {
    progress_.show("warming up", round + 1, options_.rounds);
    group_.barrier();
    call().time();
  }
  group_.barrier();
  begin_.machine = cores_of_this_process().fingerprint;
  StepTimes times = call().time_steps();
  begin_.clock_ns = times.begin_ns;
  step_us_ = std::move(times.us);
  const CallStatistics load = call().context().last_call();
  begin_.rows = load.rows_per_rank[static_cast<std::size_t>(group_.rank())];
}

TraceFile TraceRun::gather() {
  const std::vector<RankBegin> begins = group_.all_gather(begin_);
  const std::vector<double> all = group_.all_gather(step_us_);
  const std::size_t num_times = step_us_.size();
  TraceFile trace;
  trace.title = concat("distmoe ", to_string(options_.mode), ", ", options_.shapes[0].name, ", ",
                       options_.tokens[0], " tokens a rank");
  trace.step_names = call().step_names();
  trace.remarks = {concat("version=", version()), concat("machine=", rows_.device().name()),
                   concat("backend=", to_string(options_.backend)),
                   concat("engine=", to_string(options_.engine)),
                   concat("routing=", options_.routing_text())};
  const std::vector<double> begin_us = begins_of(begins);
  for (std::size_t rank = 0; rank < begins.size(); ++rank) {
    const auto times = std::span(all).subspan(rank * num_times, num_times);
    trace.ranks.push_back({.rank = static_cast<int>(rank),
                           .begin_us = begin_us[rank],
                           .step_us = {times.begin(), times.end()},
                           .rows = begins[rank].rows});
  }
  return trace;
}

void TraceRun::write(const TraceFile& trace) {
  write_file(output_, json_of(trace));
  double longest = 0.0;
  for (const RankTrace& rank : trace.ranks) {
    longest = std::max(longest, rank.step_us.back() - rank.step_us.front());
  }
  progress_.clear();
  write_stdout(concat(output_.string(), ": ", trace.step_names.size(), " steps on ",
                      trace.ranks.size(), " rank(s), the longest call ", longest,
                      " us; open it in ui.perfetto.dev or chrome://tracing\n"));
}

ExitCode TraceRun::run() {
  Failure failure = rows_.set_up();
  if (!failure.happened()) {
    failure = attempt_together(is_known_to_all_callers, [&] { make_calls(); });
  }
  if (!failure.happened()) {
    const TraceFile trace = gather();
    failure = group_.agree(attempt([&] {
      if (group_.is_first()) write(trace);
    }));
  }
  clear();
  return leave_together(group_, failure);
}

}  // namespace

RankOutcome run_trace_rank(const BenchOptions& options, const std::filesystem::path& output,
                           const std::shared_ptr<Communicator>& communicator,
                           SharedLayerValues& values) {
  TraceRun run(options, output, communicator, values);
  return run_rank_steps(
      *communicator, [&] { return run.run(); }, [&] { run.clear(); });
}

}  // namespace distmoe::tools
