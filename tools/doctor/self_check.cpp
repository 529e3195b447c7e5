// SPDX-License-Identifier: Apache-2.0
#include "doctor/self_check.hpp"

#include <memory>
#include <utility>

#include "bench/bench_options.hpp"
#include "bench/bench_rows.hpp"
#include "core/check.hpp"
#include "rank_group.hpp"
#include "rank_launch.hpp"
#include "report.hpp"
#include "standard_output.hpp"

namespace distmoe::tools {
namespace {

/// Every rank has experts and sends rows to each other one, whatever their number up to 8.
BenchOptions options_of(const RankSetup& setup) {
  BenchOptions options;
  options.shapes = {{.name = "self check",
                     .hidden_dim = 128,
                     .intermediate_dim = 64,
                     .top_k = 3,
                     .num_experts = 8}};
  options.tokens = {24};
  options.mode = BenchMode::kTrain;
  options.engine = setup.engine;
  options.backend = setup.backend;
  options.timeout = setup.timeout;
  return options;
}

class SelfCheck {
 public:
  SelfCheck(const BenchOptions& options, std::shared_ptr<Communicator> communicator,
            SharedLayerValues& values)
      : options_(options),
        group_(std::move(communicator), options.timeout),
        rows_(options, group_, progress_, values, 2) {}

  ExitCode run();

 private:
  Failure make_call();
  Failure judge(const CallCheck& check) const;

  const BenchOptions& options_;
  RankGroup group_;
  Progress progress_{false};
  BenchRows rows_;
};

Failure SelfCheck::make_call() {
  CallCheck check;
  BenchCall& call = *rows_.rows().front().call;
  Failure failure = attempt_together(is_known_to_all_callers, [&] {
    call.time();
    check = call.check();
  });
  if (failure.happened()) return failure;
  return group_.is_first() ? judge(check) : Failure{};
}

Failure SelfCheck::judge(const CallCheck& check) const {
  const double distance = check.rel_l2();
  if (distance <= options_.used_tolerance() && check.is_equal) {
    return attempt([&] {
      write_stdout(concat("correct: forward and backward on ", group_.size(), " rank(s) (",
                          to_string(options_.engine), ", ", to_string(options_.backend),
                          "), relative L2 distance ", distance_text(distance), "\n"));
    });
  }
  return {ExitCode::kRuntimeFailure, ErrorCode::kInternal,
          check.is_equal
              ? concat("the results are wrong: the relative L2 distance to a plain computation is ",
                       distance_text(distance), ", legal is at most ", options_.used_tolerance())
              : "the same call gave different bits when it was repeated"};
}

ExitCode SelfCheck::run() {
  Failure failure = rows_.set_up();
  if (!failure.happened()) failure = group_.agree(make_call());
  return leave_together(group_, failure);
}

}  // namespace

ExitCode run_self_check(const RankSetup& setup) {
  SharedLayerValues values;
  const BenchOptions options = options_of(setup);
  return launch_ranks(setup, [&](const std::shared_ptr<Communicator>& communicator, int) {
    SelfCheck check(options, communicator, values);
    return run_rank_steps(
        *communicator, [&] { return check.run(); }, [] {});
  });
}

}  // namespace distmoe::tools
