// SPDX-License-Identifier: Apache-2.0
//
// What every command that makes calls on random data sets up on a rank: the device, and a context
// with tensors for every shape and number of tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/bench_call.hpp"
#include "bench/bench_case.hpp"
#include "bench/bench_device.hpp"
#include "bench/bench_options.hpp"
#include "bench/bench_series.hpp"
#include "bench/layer_values.hpp"
#include "exit_code.hpp"
#include "progress.hpp"
#include "rank_group.hpp"
#include "rank_launch.hpp"

namespace distmoe::tools {

/// A shape with a number of tokens, on this rank.
struct RowCall {
  BenchCase plan;
  std::shared_ptr<const LayerValues> values;
  std::unique_ptr<BenchCall> call;
  const BenchWeights* weights = nullptr;  ///< those of its shape
};

class BenchRows {
 public:
  /// `num_calls` of each row are made in all. Everything given outlives this object.
  BenchRows(const BenchOptions& options, RankGroup& group, Progress& progress,
            SharedLayerValues& values, int num_calls)
      : options_(options),
        group_(group),
        progress_(progress),
        values_(values),
        num_calls_(num_calls) {}

  /// Collective. The failure is the same on every rank.
  Failure set_up();

  BenchDevice& device() { return *device_; }
  const DeviceSharing& sharing() const { return sharing_; }
  std::vector<RowCall>& rows() { return rows_; }
  int ordinal() const { return device_of_rank(options_.rank_setup(), group_.rank()); }

 private:
  // The steps, in order. prepare(), plan() and place_tensors() may fail on one rank alone: the
  // ranks agree after them.
  void prepare();
  std::string settings() const;
  void meet();
  void plan();
  void create_contexts();
  void place_tensors();

  const BenchOptions& options_;
  RankGroup& group_;
  Progress& progress_;
  SharedLayerValues& values_;
  int num_calls_;
  std::optional<CapturedRouting> captured_;
  std::unique_ptr<BenchDevice> device_;
  DeviceSharing sharing_;
  std::int64_t cache_bytes_ = 0;
  std::deque<BenchWeights> weights_;  ///< one a shape
  std::vector<RowCall> rows_;
};

}  // namespace distmoe::tools
