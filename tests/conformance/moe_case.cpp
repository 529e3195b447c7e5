// SPDX-License-Identifier: Apache-2.0
#include "conformance/moe_case.hpp"

#include <algorithm>

#include "backend/backend.hpp"
#include "backend/cuda/device.hpp"
#include "plan/option_names.hpp"

namespace distmoe::conformance {

std::string name_of(const MoeCase& moe_case) {
  const std::string combine = moe_case.combine == Combine::kPerRoute ? "per_route" : "per_rank";
  const std::string ranks = "_threads_P" + std::to_string(moe_case.ranks);
  if (moe_case.backend == BackendKind::kCpu) {
    std::string coded;
    if (moe_case.precision != Precision::kBF16) {
      coded = std::string("_") + option_name(moe_case.precision) + "_" +
              option_name(moe_case.pipeline) + (moe_case.is_prepared ? "_prepared" : "");
    }
    return "cpu" + ranks + "_w" + std::to_string(moe_case.num_threads) + "_" + combine + coded;
  }
  std::string devices;
  for (const int device : moe_case.devices) devices += std::to_string(device);
  return "cuda" + ranks + "_on_" + devices + "_" + combine;
}

MoeCase single_rank_of(const MoeCase& moe_case) {
  MoeCase single{.backend = moe_case.backend, .precision = moe_case.precision};
  if (!moe_case.devices.empty()) single.devices = {moe_case.devices.front()};
  return single;
}

MoeCase with_ranks(MoeCase moe_case, int ranks) {
  const std::vector<int> devices = moe_case.devices;
  moe_case.ranks = ranks;
  moe_case.devices.clear();
  for (std::size_t rank = 0; !devices.empty() && std::ssize(moe_case.devices) < ranks; ++rank) {
    moe_case.devices.push_back(devices[rank % devices.size()]);
  }
  return moe_case;
}

Device device_of(const MoeCase& moe_case, int rank) {
  if (moe_case.backend == BackendKind::kCpu) return {};
  return {DeviceType::kCuda, moe_case.devices[static_cast<std::size_t>(rank)]};
}

BackendContract contract_of(const MoeCase& moe_case) {
  if (moe_case.backend == BackendKind::kCpu) {
    return {.row_step = moe_case.precision == Precision::kBF16    ? 1
                        : moe_case.precision == Precision::kNVFP4 ? 16
                                                                  : 32,
            .trains =
                moe_case.precision == Precision::kBF16 || moe_case.precision == Precision::kMXFP8};
  }
  return {.host_waits = false,
          .calls_ask_the_communicator = false,
          .row_step = 8,
          .memory = "the memory of cuda:"};
}

std::string why_skipped(const MoeCase& moe_case) {
  if (moe_case.backend == BackendKind::kCpu) return "";
  if (std::string reason = cuda::why_unavailable(); !reason.empty()) {
    return "no CUDA device: " + reason;
  }
  const int last = *std::ranges::max_element(moe_case.devices);
  if (last < cuda::device_count()) return "";
  return "needs CUDA device " + std::to_string(last) + ", there are " +
         std::to_string(cuda::device_count());
}

void run_group(const MoeCase& moe_case,
               const std::function<void(std::shared_ptr<Communicator>)>& body) {
  run_thread_group(moe_case.ranks, body);
}

}  // namespace distmoe::conformance
