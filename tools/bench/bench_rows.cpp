// SPDX-License-Identifier: Apache-2.0
#include "bench/bench_rows.hpp"

#include <algorithm>

#include "core/check.hpp"

namespace distmoe::tools {
namespace {

/// What every rank tells of its device before anything is planned.
struct DeviceFacts {
  std::uint64_t identity = 0;
  std::int64_t cache_bytes = 0;
};

}  // namespace

void BenchRows::prepare() {
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
std::string BenchRows::settings() const {
  std::string text =
      concat(to_string(options_.backend), " --mode ", to_string(options_.mode), " --rounds ",
             options_.rounds, options_.graph ? " --graph" : "", " --routing ",
             options_.routing_text(), " ", options_.routing_layer, " --precision ",
             static_cast<int>(options_.precision), " --pipeline ",
             static_cast<int>(options_.pipeline), " --combine ", static_cast<int>(options_.combine),
             " --sms ", options_.num_sms.value_or(0), " --activation-policy ",
             static_cast<int>(options_.activation_policy), options_.recompute ? " --recompute" : "",
             options_.steps ? " --steps" : "", options_.peers ? " --peers" : "", " --tokens");
  for (const std::int64_t tokens : options_.tokens) text += concat(" ", tokens);
  for (const BenchShape& shape : options_.shapes) text += " --shape " + shape.name;
  return text;
}

void BenchRows::meet() {
  std::vector<std::uint64_t> identities;
  for (const DeviceFacts& facts :
       group_.all_gather(DeviceFacts{device_->identity(), device_->cache_bytes()})) {
    identities.push_back(facts.identity);
    cache_bytes_ = std::max(cache_bytes_, facts.cache_bytes);
  }
  sharing_ = device_sharing(identities);
}

void BenchRows::plan() {
  progress_.show("planning");
  const int laps_per_call = device_->is_asynchronous() ? 2 : 1;
  const BenchSetting setting{.options = options_,
                             .rank = group_.rank(),
                             .num_ranks = group_.size(),
                             .cache_bytes = cache_bytes_,
                             .num_laps = num_calls_ * laps_per_call,
                             .captured = captured_ ? &*captured_ : nullptr};
  for (const BenchShape& shape : options_.shapes) {
    for (const std::int64_t tokens : options_.tokens) {
      rows_.push_back({.plan = make_bench_case(shape, tokens, setting),
                       .values = values_.of(shape),
                       .call = nullptr});
    }
  }
  for (RowCall& row : rows_) {
    row.call = std::make_unique<BenchCall>(*device_, row.plan, options_, group_);
  }
}

void BenchRows::create_contexts() {
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    progress_.show("creating contexts", static_cast<std::int64_t>(i + 1), std::ssize(rows_));
    rows_[i].call->create_context(ordinal());
  }
}

void BenchRows::place_tensors() {
  const std::size_t rows_per_shape = options_.tokens.size();
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    progress_.show("filling tensors", static_cast<std::int64_t>(i + 1), std::ssize(rows_));
    RowCall& row = rows_[i];
    if (i % rows_per_shape == 0) {
      int num_copies = 1;
      for (std::size_t j = i; j < i + rows_per_shape; ++j) {
        num_copies = std::max(num_copies, rows_[j].plan.num_weight_copies);
      }
      weights_.emplace_back(*device_, *row.values, row.call->context(), num_copies);
    }
    row.weights = &weights_.back();
    row.call->place_tensors(*row.values, *row.weights);
  }
}

Failure BenchRows::set_up() {
  Failure failure = group_.agree(attempt([&] { prepare(); }));
  if (!failure.happened()) failure = group_.find_difference(settings());
  if (failure.happened()) return failure;
  meet();
  failure = group_.agree(attempt([&] { plan(); }));
  if (!failure.happened()) {
    failure = attempt_together(is_known_to_all_creators, [&] { create_contexts(); });
  }
  if (failure.happened()) return failure;
  return group_.agree(attempt([&] { place_tensors(); }));
}

}  // namespace distmoe::tools
