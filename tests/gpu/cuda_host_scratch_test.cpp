// SPDX-License-Identifier: Apache-2.0
//
// Invariant: rows beyond the device's scratch lie in pages of the host, and nothing else changes:
// the bits of forwards, gradients and replays are those of a plan that has all rows on the device;
// more rows than the host's pages have too are capacity_exceeded; closed contexts leave nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/device.hpp"
#include "backend/cuda/virtual_range.hpp"
#include "conformance/moe_oracle.hpp"
#include "conformance/moe_refusal.hpp"
#include "conformance/process_usage.hpp"
#include "gpu/gpu_training.hpp"

namespace distmoe::gpu {
namespace {

using conformance::BackwardForm;
using conformance::DeviceCall;
using conformance::expect_error;
using conformance::first_difference;
using conformance::GradientValues;
using conformance::MoeProblem;
using conformance::outcome_of;
using conformance::RoutePattern;

constexpr std::int64_t kTokensOfARank = 1024;
constexpr std::int64_t kExperts = 8;
constexpr std::int64_t kTopK = 2;
constexpr std::int64_t kPageBytes = std::int64_t{2} << 20;

class CudaHostScratch : public testing::TestWithParam<Devices> {
 protected:
  void SetUp() override {
    const std::string reason = conformance::why_skipped(cuda_case(GetParam()));
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
  int ranks() const { return static_cast<int>(GetParam().size()); }
  std::int64_t num_tokens() const { return kTokensOfARank * ranks(); }

  /// All routes go to the experts of rank 0.
  MoeProblem problem(std::uint64_t seed) const {
    MoeProblem problem = conformance::make_problem({.num_tokens = num_tokens(),
                                                    .hidden_dim = 1024,
                                                    .intermediate_dim = 512,
                                                    .num_experts = kExperts,
                                                    .top_k = kTopK},
                                                   RoutePattern::kDistinct, seed);
    const std::int64_t local = kExperts / ranks();
    for (std::size_t route = 0; route < problem.ids.size(); ++route) {
      problem.ids[route] = static_cast<std::int64_t>(route + route / 2) % local;
    }
    return problem;
  }

  GpuRun run(std::function<void(Config&)> adjust) const {
    return {.devices = GetParam(),
            .counts = conformance::even_split(num_tokens(), ranks()),
            .adjust = std::move(adjust)};
  }

  /// Room for a quarter of the rows of rank 0 on the device, for `of_all` of them with the host.
  void plan_host_scratch(Config& config, double of_all = 1.0) const {
    config.max_tokens = kTokensOfARank;
    config.device_scratch_capacity_factor = 0.25 * ranks();
    config.host_scratch = HostScratch{.total_scratch_capacity_factor = of_all * ranks()};
  }
  void plan_device_scratch(Config& config) const {
    config.max_tokens = kTokensOfARank;
    config.device_scratch_capacity_factor = ranks();
  }

  /// Every rank's gradients of one step.
  std::vector<std::optional<GradientValues>> step(const MoeProblem& problem,
                                                  const std::vector<BF16>& dy,
                                                  const BackwardForm& form, bool uses_host) const {
    std::vector<std::optional<GradientValues>> of_ranks(GetParam().size());
    GpuRun training = training_run(num_tokens(), GetParam(), form);
    training.adjust = [&, base = training.adjust](Config& config) {
      base(config);
      uses_host ? plan_host_scratch(config) : plan_device_scratch(config);
    };
    on_every_rank(problem, training, [&](Context& context, DeviceCall& call, Communicator&) {
      const Training what{problem, dy, form, training};
      GradientValues first = trained(context, call, what);
      EXPECT_EQ(first_difference(first, trained(context, call, what)), "");
      const RegionPeaks peaks = context.region_peaks();
      EXPECT_EQ(peaks.host_scratch_bytes > 0, uses_host && context.rank() == 0);
      EXPECT_LE(peaks.device_scratch_bytes, context.memory_plan().device_scratch_bytes);
      EXPECT_LE(peaks.host_scratch_bytes, context.memory_plan().host_scratch_bytes);
      of_ranks[static_cast<std::size_t>(context.rank())].emplace(std::move(first));
    });
    return of_ranks;
  }
};

std::string ranks_name(const testing::TestParamInfo<Devices>& ranks) {
  std::string name = "on_";
  for (const int device : ranks.param) name += std::to_string(device);
  return name;
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaHostScratch,
                         testing::Values(Devices{0}, Devices{0, 0}, Devices{0, 0, 0, 0},
                                         Devices{0, 1}),
                         ranks_name);

TEST_P(CudaHostScratch, AForwardAndItsReplaysHaveTheBitsOfDeviceScratch) {
  const MoeProblem problem = this->problem(31);
  const std::vector<BF16> expected =
      run_cuda(problem, run([&](Config& config) { plan_device_scratch(config); }));
  EXPECT_EQ(conformance::first_violation(problem, expected), "");
  for (const bool prefetches : {true, false}) {
    RowsOfRanks called(GetParam().size());
    RowsOfRanks replayed(GetParam().size());
    const GpuRun on_host = run([&](Config& config) {
      plan_host_scratch(config);
      config.host_scratch->prefetch = prefetches;
    });
    on_every_rank(problem, on_host, [&](Context& context, DeviceCall& call, Communicator& group) {
      const PhysicalSections sections = physical_sections(context.memory_plan(), kPageBytes);
      EXPECT_GT(sections.host_bytes, 0);
      routed_experts(context, call.input(), call.weights(), call.y.view());
      context.check();
      called.put(context.rank(), call.y_rows());
      EXPECT_EQ(context.region_peaks().host_scratch_bytes > 0, context.rank() == 0);
      const int device = GetParam()[static_cast<std::size_t>(context.rank())];
      cuda::DeviceGraph graph(device, [&](void* stream) {
        routed_experts(context, call.input(), call.weights(), call.y.view(), {.stream = stream});
      });
      group.barrier(std::chrono::seconds(60));
      graph.replay();
      context.check();
      replayed.put(context.rank(), call.y_rows());
    });
    EXPECT_EQ(conformance::first_difference(expected, called.all(), problem.shape.hidden_dim), "");
    EXPECT_EQ(conformance::first_difference(expected, replayed.all(), problem.shape.hidden_dim),
              "");
  }
}

TEST_P(CudaHostScratch, GradientsHaveTheBitsOfDeviceScratch) {
  const MoeProblem problem = this->problem(32);
  const std::vector<BF16> dy = conformance::make_dy(problem, 33);
  for (const ActivationPolicy policy : {ActivationPolicy::kFull, ActivationPolicy::kLean}) {
    // All is computed again; all is saved.
    for (const double slot_factor : {0.0, static_cast<double>(ranks())}) {
      SCOPED_TRACE(slot_factor);
      const BackwardForm form{.policy = policy, .slot_factor = slot_factor};
      const auto expected = step(problem, dy, form, false);
      const auto actual = step(problem, dy, form, true);
      for (std::size_t rank = 0; rank < expected.size(); ++rank) {
        ASSERT_TRUE(expected[rank] && actual[rank]);
        EXPECT_EQ(first_difference(*expected[rank], *actual[rank]), "");
      }
    }
  }
}

TEST_P(CudaHostScratch, BeyondTheHostsPagesIsExceededCapacityAndTheNextCallWorks) {
  const MoeProblem problem = this->problem(34);
  MoeProblem half = problem;
  for (std::size_t route = 0; route < half.ids.size(); route += 2) half.ids[route] = -1;
  const std::vector<BF16> expected =
      run_cuda(half, run([&](Config& config) { plan_device_scratch(config); }));
  RowsOfRanks rows(GetParam().size());
  const GpuRun tight = run([&](Config& config) { plan_host_scratch(config, 0.75); });
  on_every_rank(problem, tight, [&](Context& context, DeviceCall& call, Communicator&) {
    const auto outcome = outcome_of([&] {
      routed_experts(context, call.input(), call.weights(), call.y.view());
      context.check();
    });
    expect_error(outcome, ErrorCode::kCapacityExceeded,
                 {std::to_string(num_tokens() * kTopK) + " required"});
    EXPECT_TRUE(all_nan(call.y_rows()));
    call.ids.upload(conformance::pack_rank(half, {}, tight.counts, context.rank()).ids);
    routed_experts(context, call.input(), call.weights(), call.y.view());
    context.check();
    rows.put(context.rank(), call.y_rows());
  });
  EXPECT_EQ(conformance::first_difference(expected, rows.all(), problem.shape.hidden_dim), "");
}

std::int64_t free_device_bytes() {
  std::size_t free_bytes = 0;
  std::size_t all_bytes = 0;
  DISTMOE_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &all_bytes));
  return static_cast<std::int64_t>(free_bytes);
}

TEST_F(GpuTest, ContextsWithHostScratchComeAndGoAndLeaveNothing) {
  Config config;
  config.max_tokens = 4096;
  config.hidden_dim = 1024;
  config.intermediate_dim = 512;
  config.num_experts = kExperts;
  config.top_k = kTopK;
  config.max_moe_layers_per_activation_slot = 1;
  config.device_scratch_capacity_factor = 0.5;
  config.host_scratch = HostScratch{};
  const auto come_and_go = [&] {
    Context context = Context::create(config, {.backend = BackendKind::kCuda});
    context.close();
  };
  for (int i = 0; i < 10; ++i) come_and_go();  // the runtime's own memory
  const std::int64_t device_bytes = free_device_bytes();
  const std::int64_t host_bytes = conformance::anonymous_bytes();
  const std::int64_t files = conformance::num_file_descriptors();
  const std::int64_t threads = conformance::num_threads();
  for (int i = 0; i < 200; ++i) come_and_go();
  EXPECT_EQ(free_device_bytes(), device_bytes);
  EXPECT_LE(conformance::anonymous_bytes(), host_bytes + kPageBytes);
  EXPECT_EQ(conformance::num_file_descriptors(), files);
  EXPECT_EQ(conformance::num_threads(), threads);
  EXPECT_EQ(cuda::VirtualRange::num_left_behind(), 0U);
}

}  // namespace
}  // namespace distmoe::gpu
