// SPDX-License-Identifier: Apache-2.0
//
// PyTorch layers as peers of a benchmark: a Python process beside this one that makes the same
// layers and times them when it is asked (bench/torch_peers.py, which this program carries).
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "bench/bench_case.hpp"
#include "child_process.hpp"
#include "distmoe/memory_plan.hpp"

namespace distmoe::tools {

class TorchPeers {
 public:
  /// Starts `python` with PyTorch on `backend`, on all cores that `num_threads` says or on the
  /// first GPU. Throws unsupported with the reason where that does not work, and io where it, or
  /// any answer later, takes longer than `timeout`.
  TorchPeers(const std::string& python, BackendKind backend, int num_threads,
             std::chrono::milliseconds timeout);

  /// "PyTorch 2.13.0".
  const std::string& version() const { return version_; }
  /// "torch loop", ...
  const std::vector<std::string>& names() const { return names_; }

  /// Makes the tensors of row `row`, with the routes of some of its sets. Throws unsupported with
  /// PyTorch's reason, and where a route is disabled, which these layers do not know.
  void add_layer(std::size_t row, const BenchCase& plan, bool trains);
  /// One call of peer `name`, in microseconds. Throws as above.
  double time(std::size_t row, std::size_t name);

 private:
  std::string ask(const std::string& request);

  std::chrono::milliseconds timeout_;
  std::unique_ptr<ChildProcess> process_;
  std::string version_;
  std::vector<std::string> names_;
  std::vector<std::string> variants_;
};

}  // namespace distmoe::tools
