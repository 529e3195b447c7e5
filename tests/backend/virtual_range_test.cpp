// SPDX-License-Identifier: Apache-2.0
//
// Invariant: whatever the driver refuses, and when, a range that failed to be made leaves nothing
// mapped, and what could not be given back is offered again until the driver takes it.
#include "backend/cuda/virtual_range.hpp"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "distmoe/error.hpp"

namespace distmoe::cuda {
namespace {

constexpr std::int64_t kPage = std::int64_t{2} << 20;
constexpr CUdeviceptr kBase = CUdeviceptr{1} << 40;

/// What the driver holds, and which of its calls fails. One of the process, as drivers are.
struct FakeDriver {
  std::map<CUdeviceptr, std::size_t> ranges;
  std::map<CUmemGenericAllocationHandle, CUmemLocationType> memory;
  std::map<CUdeviceptr, CUmemGenericAllocationHandle> mapped;
  std::set<CUdeviceptr> accessible;
  CUmemGenericAllocationHandle next_handle = 1;
  CUdeviceptr next_base = kBase;
  std::string failing;   ///< the call that fails
  int works_before = 0;  ///< so many times it works first

  CUresult answer(const std::string& call) {
    return call == failing && works_before-- <= 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
  }
  bool holds_nothing() const { return ranges.empty() && memory.empty() && mapped.empty(); }
};
FakeDriver driver_state;

VirtualMemoryDriver fake_driver() {
  return {
      .granularity =
          [](std::size_t* bytes, const CUmemAllocationProp* properties,
             CUmemAllocationGranularity_flags) {
            *bytes = properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? kPage : 4096;
            return driver_state.answer("granularity");
          },
      .reserve =
          [](CUdeviceptr* base, std::size_t bytes, std::size_t, CUdeviceptr, unsigned long long) {
            if (const CUresult result = driver_state.answer("reserve")) return result;
            *base = driver_state.next_base;
            driver_state.next_base += CUdeviceptr{1} << 38U;
            driver_state.ranges[*base] = bytes;
            return CUDA_SUCCESS;
          },
      .free =
          [](CUdeviceptr base, std::size_t bytes) {
            if (const CUresult result = driver_state.answer("free")) return result;
            EXPECT_EQ(driver_state.ranges.at(base), bytes);
            driver_state.ranges.erase(base);
            return CUDA_SUCCESS;
          },
      .create =
          [](CUmemGenericAllocationHandle* handle, std::size_t bytes,
             const CUmemAllocationProp* properties, unsigned long long) {
            if (const CUresult result = driver_state.answer("create")) return result;
            EXPECT_EQ(bytes % kPage, 0);
            *handle = driver_state.next_handle++;
            driver_state.memory[*handle] = properties->location.type;
            return CUDA_SUCCESS;
          },
      .release =
          [](CUmemGenericAllocationHandle handle) {
            if (const CUresult result = driver_state.answer("release")) return result;
            EXPECT_EQ(driver_state.memory.erase(handle), 1);
            return CUDA_SUCCESS;
          },
      .map =
          [](CUdeviceptr at, std::size_t, std::size_t, CUmemGenericAllocationHandle handle,
             unsigned long long) {
            if (const CUresult result = driver_state.answer("map")) return result;
            EXPECT_TRUE(driver_state.memory.contains(handle));
            EXPECT_TRUE(driver_state.mapped.emplace(at, handle).second);
            return CUDA_SUCCESS;
          },
      .unmap =
          [](CUdeviceptr at, std::size_t) {
            if (const CUresult result = driver_state.answer("unmap")) return result;
            EXPECT_EQ(driver_state.mapped.erase(at), 1);
            driver_state.accessible.erase(at);
            return CUDA_SUCCESS;
          },
      .set_access =
          [](CUdeviceptr at, std::size_t, const CUmemAccessDesc* access, std::size_t count) {
            if (const CUresult result = driver_state.answer("set_access")) return result;
            EXPECT_EQ(count, 1);
            EXPECT_EQ(access->location.type, CU_MEM_LOCATION_TYPE_DEVICE);
            driver_state.accessible.insert(at);
            return CUDA_SUCCESS;
          },
  };
}

constexpr PhysicalSections kSections{.granularity_bytes = kPage,
                                     .device_prefix_bytes = 3 * kPage,
                                     .host_bytes = 5 * kPage,
                                     .device_hot_bytes = 2 * kPage,
                                     .padding_bytes = 0};
constexpr RangePlace kPlace{.device = 0, .host_node = 1};

class VirtualRanges : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override { driver_state = {}; }
};
INSTANTIATE_TEST_SUITE_P(Mapped, VirtualRanges, testing::Bool(), [](const auto& later) {
  return std::string(later.param ? "on_a_thread" : "at_once");
});

TEST_P(VirtualRanges, HavePrefixHostPagesAndHotMemoryInThatOrder) {
  {
    VirtualRange range(fake_driver(), kPlace, kSections, GetParam());
    range.wait();
    EXPECT_EQ(reinterpret_cast<CUdeviceptr>(range.base()), kBase);
    EXPECT_EQ(driver_state.ranges.at(kBase), 10 * kPage);
    const auto location = [&](std::int64_t pages) {
      return driver_state.memory.at(driver_state.mapped.at(kBase + pages * kPage));
    };
    EXPECT_EQ(location(0), CU_MEM_LOCATION_TYPE_DEVICE);
    EXPECT_EQ(location(3), CU_MEM_LOCATION_TYPE_HOST_NUMA);
    EXPECT_EQ(location(8), CU_MEM_LOCATION_TYPE_DEVICE);
    EXPECT_EQ(driver_state.accessible.size(), 3);
  }
  EXPECT_TRUE(driver_state.holds_nothing());
}

TEST_P(VirtualRanges, ThatFailToBeMadeLeaveNothing) {
  for (const std::string call : {"reserve", "create", "map", "set_access"}) {
    for (int works_before = 0; works_before < (call == "reserve" ? 1 : 3); ++works_before) {
      SCOPED_TRACE(call + " " + std::to_string(works_before));
      driver_state = {};
      driver_state.failing = call;
      driver_state.works_before = works_before;
      const auto make = [&] {
        VirtualRange range(fake_driver(), kPlace, kSections, GetParam());
        range.wait();
      };
      try {
        make();
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
        // Host pages come last.
        const bool is_host = works_before == 2;
        const std::string bytes = std::to_string((call == "reserve"  ? 10
                                                  : is_host          ? 5
                                                  : works_before > 0 ? 2
                                                                     : 3) *
                                                 kPage);
        EXPECT_NE(std::string(error.what()).find(bytes), std::string::npos) << error.what();
        EXPECT_EQ(std::string(error.what()).find("host") != std::string::npos, is_host);
      }
      EXPECT_TRUE(driver_state.holds_nothing());
      EXPECT_EQ(VirtualRange::num_left_behind(), 0);
    }
  }
}

TEST_P(VirtualRanges, ThatTheDriverDoesNotTakeBackAreOfferedAgain) {
  for (const std::string call : {"unmap", "release", "free"}) {
    SCOPED_TRACE(call);
    driver_state = {};
    {
      VirtualRange range(fake_driver(), kPlace, kSections, GetParam());
      range.wait();
      driver_state.failing = call;
    }
    EXPECT_FALSE(driver_state.holds_nothing());
    EXPECT_EQ(VirtualRange::num_left_behind(), 1);
    { VirtualRange refused_again(fake_driver(), kPlace, kSections, false); }
    EXPECT_EQ(VirtualRange::num_left_behind(), 2);
    driver_state.failing.clear();
    { VirtualRange next(fake_driver(), kPlace, kSections, GetParam()); }
    EXPECT_EQ(VirtualRange::num_left_behind(), 0);
    EXPECT_TRUE(driver_state.holds_nothing());
  }
}

TEST_P(VirtualRanges, WithoutHostPagesAreMemoryOfTheDeviceAlone) {
  PhysicalSections sections = kSections;
  sections.host_bytes = sections.device_prefix_bytes = 0;
  VirtualRange range(fake_driver(), kPlace, sections, GetParam());
  range.wait();
  EXPECT_EQ(driver_state.mapped.size(), 1);
}

TEST(RangeGranularity, IsThatOfBothMemories) {
  driver_state = {};
  EXPECT_EQ(range_granularity(fake_driver(), kPlace), kPage);
  driver_state.failing = "granularity";
  EXPECT_THROW(range_granularity(fake_driver(), kPlace), Error);
}

}  // namespace
}  // namespace distmoe::cuda
