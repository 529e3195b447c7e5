// SPDX-License-Identifier: Apache-2.0
#include "gpu/gpu_ranks.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "backend/backend.hpp"
#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/device.hpp"

namespace distmoe::gpu {

using conformance::DeviceCall;
using conformance::MoeProblem;
using conformance::RankCall;

std::vector<Devices> all_devices() {
  std::vector<Devices> result = {{0}, {0, 0}, {0, 0, 0}, {0, 0, 0, 0}};
  if (cuda::device_count() > 1) result.insert(result.end(), {{0, 1}, {1, 0}, {0, 1, 0}});
  return result;
}

void LaunchForm::apply(Config& config) const {
  config.max_tokens = std::max(config.max_tokens, least_room);
  config.num_sms = num_sms;
}

std::vector<LaunchForm> launch_forms() {
  return {{.name = "in steps", .least_room = 300},
          {.name = "one launch of the head"},
          {.name = "one launch of the head, one of the end", .num_sms = 64}};
}

std::string name_of(const Devices& devices) {
  return std::to_string(devices.size()) + " ranks, last on device " +
         std::to_string(devices.back());
}

conformance::MoeCase cuda_case(const Devices& devices) {
  return {
      .backend = BackendKind::kCuda, .ranks = static_cast<int>(devices.size()), .devices = devices};
}

void GpuTest::SetUp() {
  if (const std::string reason = cuda::why_unavailable(); !reason.empty()) {
    GTEST_SKIP() << "no CUDA device: " << reason;
  }
}

void on_every_rank(const MoeProblem& problem, const GpuRun& run, const RankBody& body) {
  const conformance::MoeCase moe_case = cuda_case(run.devices);
  Config config =
      conformance::config_of(problem, moe_case, run.form, *std::ranges::max_element(run.counts));
  config.timeout = std::chrono::seconds(20);
  if (run.adjust) run.adjust(config);
  conformance::run_group(moe_case, [&](const std::shared_ptr<Communicator>& group) {
    const int rank = group->rank();
    Context context = conformance::make_context(config, moe_case, group);
    const RankCall host = conformance::pack_rank(problem, run.form, run.counts, rank);
    DeviceCall call(host, run.devices[static_cast<std::size_t>(rank)]);
    body(context, call, *group);
    group->barrier(std::chrono::seconds(60));
  });
}

std::vector<BF16> run_cuda(const MoeProblem& problem, const GpuRun& run) {
  RowsOfRanks rows(run.devices.size());
  on_every_rank(problem, run, [&](Context& context, DeviceCall& call, Communicator&) {
    routed_experts(context, call.input(), call.weights(), call.y.view());
    context.check();
    rows.put(context.rank(), call.y_rows());
  });
  return rows.all();
}

std::vector<BF16> RowsOfRanks::all() const {
  std::vector<BF16> y;
  for (const std::vector<BF16>& part : rows_) y.insert(y.end(), part.begin(), part.end());
  return y;
}

bool all_nan(const std::vector<BF16>& rows) {
  return std::ranges::all_of(rows, [](BF16 value) { return std::isnan(to_float(value)); });
}

Stream::Stream(int device) : device_(device) {
  const cuda::DeviceScope scope(device);
  DISTMOE_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

Stream::~Stream() {
  cudaSetDevice(device_);
  cudaStreamDestroy(stream_);
}

}  // namespace distmoe::gpu
