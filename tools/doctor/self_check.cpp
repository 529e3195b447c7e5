// SPDX-License-Identifier: Apache-2.0
#include "doctor/self_check.hpp"

#include <memory>
#include <utility>

#include "bench/bench_call.hpp"
#include "bench/bench_case.hpp"
#include "bench/bench_device.hpp"
#include "bench/bench_options.hpp"
#include "bench/layer_values.hpp"
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
  SelfCheck(const RankSetup& setup, std::shared_ptr<Communicator> communicator,
            SharedLayerValues& values)
      : setup_(setup),
        options_(options_of(setup)),
        values_(values.of(options_.shapes[0])),
        group_(std::move(communicator), setup.timeout) {}

  ExitCode run();

 private:
  Failure call_once();
  void prepare();
  Failure judge(const CallCheck& check) const;

  const RankSetup& setup_;
  BenchOptions options_;
  std::shared_ptr<const LayerValues> values_;
  RankGroup group_;
  std::unique_ptr<BenchDevice> device_;
  BenchCase case_;
  std::unique_ptr<BenchWeights> weights_;
  std::unique_ptr<BenchCall> call_;
};

void SelfCheck::prepare() {
  device_ = setup_.backend == BackendKind::kCuda
                ? make_cuda_bench_device(device_of_rank(setup_, group_.rank()))
                : make_cpu_bench_device();
  case_ = make_bench_case(options_.shapes[0], options_.tokens[0],
                          {.options = options_,
                           .rank = group_.rank(),
                           .num_ranks = group_.size(),
                           .cache_bytes = 1,  // a call or two, not one that misses every cache
                           .num_laps = 2});
  call_ = std::make_unique<BenchCall>(*device_, case_, options_, group_);
}

Failure SelfCheck::call_once() {
  CallCheck own;
  Failure failure = attempt_together(is_known_to_all_callers, [&] {
    call_->time();
    own = call_->check();
  });
  if (failure.happened()) return failure;
  CallCheck all;
  for (const CallCheck& rank : group_.all_gather(own)) all.merge(rank);
  return group_.is_first() ? judge(all) : Failure{};
}

Failure SelfCheck::judge(const CallCheck& check) const {
  const double distance = check.rel_l2();
  if (distance <= options_.tolerance && check.is_equal) {
    return attempt([&] {
      write_stdout(concat("correct: forward and backward on ", group_.size(), " rank(s) (",
                          to_string(setup_.engine), ", ", to_string(setup_.backend),
                          "), relative L2 distance ", distance_text(distance), "\n"));
    });
  }
  return {ExitCode::kRuntimeFailure, ErrorCode::kInternal,
          check.is_equal
              ? concat("the results are wrong: the relative L2 distance to a plain computation is ",
                       distance_text(distance), ", legal is at most ", options_.tolerance)
              : "the same call gave different bits when it was repeated"};
}

ExitCode SelfCheck::run() {
  Failure failure = group_.agree(attempt([&] { prepare(); }));
  if (!failure.happened()) {
    failure = attempt_together(is_known_to_all_creators, [&] {
      call_->create_context(device_of_rank(setup_, group_.rank()));
    });
  }
  if (!failure.happened()) {
    failure = group_.agree(attempt([&] {
      weights_ = std::make_unique<BenchWeights>(*device_, *values_, call_->context().first_expert(),
                                                call_->context().num_local_experts(),
                                                case_.num_weight_copies);
      call_->place_tensors(*values_, *weights_);
    }));
  }
  if (!failure.happened()) failure = group_.agree(call_once());
  if (failure.happened() && group_.is_first()) print_error(failure.message);
  // NOTE: mpirun ends all processes once one has failed.
  group_.barrier();
  return failure.exit_code;
}

}  // namespace

ExitCode run_self_check(const RankSetup& setup) {
  SharedLayerValues values;
  return launch_ranks(setup, [&](const std::shared_ptr<Communicator>& communicator, int) {
    SelfCheck check(setup, communicator, values);
    return run_rank_steps(
        *communicator, [&] { return check.run(); }, [] {});
  });
}

}  // namespace distmoe::tools
