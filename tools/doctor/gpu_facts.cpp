// SPDX-License-Identifier: Apache-2.0
#include "doctor/gpu_facts.hpp"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <numeric>
#include <sstream>

#include "backend/backend.hpp"
#include "backend/cuda/device.hpp"
#include "bench/bench_device.hpp"
#include "bench/bench_series.hpp"
#include "bench/spread.hpp"
#include "rank_group.hpp"

namespace distmoe::tools {
namespace {

constexpr std::chrono::seconds kLinkTimeout{20};
constexpr int kLinkRounds = 5;

/// Microseconds per byte of one rank's link; empty with a reason where there is none.
std::optional<double> us_per_byte(const std::shared_ptr<Communicator>& communicator,
                                  std::string& why_not) {
  RankGroup group(communicator, kLinkTimeout);
  const auto device = make_cuda_bench_device(group.rank());
  std::vector<int> readers(static_cast<std::size_t>(group.size()));
  std::iota(readers.begin(), readers.end(), 0);
  const std::optional<Ceiling> link = device->link_read(group, readers, why_not);
  if (!link) return std::nullopt;
  std::vector<double> samples;
  for (int round = 0; round < kLinkRounds; ++round) {
    group.barrier();
    samples.push_back(us_per_work(*device, *link));
  }
  // NOTE: nobody gives back memory that a peer still reads.
  group.barrier();
  return spread_of(samples).median;
}

}  // namespace

std::string kernel_module_version(const std::string& text) {
  std::istringstream words(text.substr(0, text.find('\n')));
  for (std::string word; words >> word;) {
    const bool is_version = word.find('.') != std::string::npos &&
                            word.find_first_not_of("0123456789.") == std::string::npos;
    if (is_version) return word;
  }
  return {};
}

GpuFacts inspect_gpus() {
  GpuFacts facts;
  facts.is_compiled = cuda::kIsCompiled;
  std::ifstream file("/proc/driver/nvidia/version");
  facts.kernel_module = kernel_module_version({std::istreambuf_iterator<char>(file), {}});
  facts.problem = cuda::why_unavailable();
  ask_driver(facts);
  return facts;
}

LinkRate measure_link(int num_gpus) {
  LinkRate rate;
  if (num_gpus < 2) return {{}, "a single GPU has no peer"};
  std::mutex mutex;
  double slowest = 0.0;
  run_thread_group(num_gpus, [&](const std::shared_ptr<Communicator>& communicator) {
    std::string why_not;
    const std::optional<double> us = us_per_byte(communicator, why_not);
    const std::lock_guard lock(mutex);
    if (us) slowest = std::max(slowest, *us);
    if (!why_not.empty()) rate.why_not = why_not;
  });
  if (slowest > 0.0) rate.gb_s = 1e-3 / slowest;
  return rate;
}

}  // namespace distmoe::tools
