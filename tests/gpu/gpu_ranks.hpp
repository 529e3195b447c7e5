// SPDX-License-Identifier: Apache-2.0
//
// Ranks as threads with a GPU each, or several on one, for tests that look closer than the laws of
// the conformance suite do.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "conformance/moe_runner.hpp"
#include "distmoe/communicator.hpp"

namespace distmoe::gpu {

/// The devices of the ranks.
using Devices = std::vector<int>;

/// One to four ranks on the first GPU; where there are two GPUs, two and three ranks on both too.
std::vector<Devices> all_devices();

/// How a call with peers is launched, as far as its tokens and the GPU allow.
struct LaunchForm {
  std::string name;
  std::int64_t least_room = 0;  ///< of max_tokens; of more than a routing chunk: head in steps
  /// Fewer SMs than the GPU has leave room for blocks that wait: combine meets the peers itself,
  /// also where ranks share it.
  std::optional<std::int64_t> num_sms = std::nullopt;

  void apply(Config& config) const;
};

/// Head and end in steps, or either in one launch.
std::vector<LaunchForm> launch_forms();

/// "3 ranks, last on device 0"
std::string name_of(const Devices& devices);

conformance::MoeCase cuda_case(const Devices& devices);

/// A test that is skipped by name where there is no Hopper GPU.
class GpuTest : public testing::Test {
 protected:
  void SetUp() override;
};

using RankBody = std::function<void(Context&, conformance::DeviceCall&, Communicator&)>;

struct GpuRun {
  Devices devices{0};
  conformance::TokenCounts counts;
  conformance::CallForm form{};
  std::function<void(Config&)> adjust{};
};

/// Makes a context and a call on every rank and hands them to `body`.
void on_every_rank(const conformance::MoeProblem& problem, const GpuRun& run, const RankBody& body);

/// One call on every rank: y of all tokens.
std::vector<BF16> run_cuda(const conformance::MoeProblem& problem, const GpuRun& run);

/// The rows of all ranks, one rank after the other.
class RowsOfRanks {
 public:
  explicit RowsOfRanks(std::size_t ranks) : rows_(ranks) {}
  void put(int rank, std::vector<BF16> rows) {
    rows_[static_cast<std::size_t>(rank)] = std::move(rows);
  }
  std::vector<BF16> all() const;

 private:
  std::vector<std::vector<BF16>> rows_;
};

bool all_nan(const std::vector<BF16>& rows);

/// A stream on `device` that nothing else waits for.
class Stream {
 public:
  explicit Stream(int device);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  int device_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace distmoe::gpu
