// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/virtual_range.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/cuda/cuda_check.hpp"
#include "core/check.hpp"
#include "core/log.hpp"

namespace distmoe::cuda {
namespace {

template <typename Function>
void find(const char* name, Function& function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  DISTMOE_CUDA_CHECK(
      cudaGetDriverEntryPointByVersion(name, &found, 12020, cudaEnableDefault, &result));
  DISTMOE_CHECK(result == cudaDriverEntryPointSuccess, kUnsupported, "the CUDA driver has no ",
                name, " of CUDA 12.2, which host scratch needs");
  function = reinterpret_cast<Function>(found);
}

CUmemLocation device_memory(const RangePlace& place) {
  return {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = place.device};
}
CUmemLocation host_pages(const RangePlace& place) {
  return {.type = CU_MEM_LOCATION_TYPE_HOST_NUMA, .id = place.host_node};
}

CUmemAllocationProp allocation_at(CUmemLocation location) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = location;
  return properties;
}

}  // namespace

VirtualMemoryDriver find_virtual_memory_driver() {
  VirtualMemoryDriver driver;
  find("cuMemGetAllocationGranularity", driver.granularity);
  find("cuMemAddressReserve", driver.reserve);
  find("cuMemAddressFree", driver.free);
  find("cuMemCreate", driver.create);
  find("cuMemRelease", driver.release);
  find("cuMemMap", driver.map);
  find("cuMemUnmap", driver.unmap);
  find("cuMemSetAccess", driver.set_access);
  return driver;
}

RangePlace find_range_place(int device) {
  CUresult (*attribute)(int*, CUdevice_attribute, CUdevice) = nullptr;
  find("cuDeviceGetAttribute", attribute);
  const auto value_of = [&](CUdevice_attribute name) {
    int value = 0;
    return attribute(&value, name, device) == CUDA_SUCCESS ? value : 0;
  };
  DISTMOE_CHECK(
      value_of(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) != 0 &&
          value_of(CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) != 0,
      kUnsupported, "CUDA device ", device,
      " cannot map pages of the host, which host scratch needs; plan without host_scratch, with a "
      "larger device_scratch_capacity_factor");
  // -1 where the system has one node.
  return {device, std::max(0, value_of(CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID))};
}

std::int64_t range_granularity(const VirtualMemoryDriver& driver, const RangePlace& place) {
  std::size_t largest = 0;
  for (const CUmemLocation& location : {device_memory(place), host_pages(place)}) {
    const CUmemAllocationProp properties = allocation_at(location);
    std::size_t bytes = 0;
    const CUresult result =
        driver.granularity(&bytes, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    DISTMOE_CHECK(result == CUDA_SUCCESS, kDeviceFault,
                  "cuMemGetAllocationGranularity failed with error ", int{result});
    largest = std::max(largest, bytes);
  }
  return static_cast<std::int64_t>(largest);
}

/// What drivers refused to take back, of all ranges of the process.
struct VirtualRange::LeftBehind {
  std::mutex mutex;
  std::vector<Mapped> ranges;

  static LeftBehind& of_process() {
    static auto* all = new LeftBehind;  // never destroyed: the driver may end before
    return *all;
  }
  void offer_again() {
    const std::scoped_lock lock(mutex);
    std::erase_if(ranges, [](Mapped& range) { return range.give_back(); });
  }
};

std::size_t VirtualRange::num_left_behind() {
  LeftBehind& left = LeftBehind::of_process();
  const std::scoped_lock lock(left.mutex);
  return left.ranges.size();
}

VirtualRange::VirtualRange(const VirtualMemoryDriver& driver, const RangePlace& place,
                           const PhysicalSections& sections, bool maps_host_later)
    : place_(place), mapped_{.driver = driver} {
  LeftBehind::of_process().offer_again();
  const std::array<std::int64_t, 3> bytes = {sections.device_prefix_bytes, sections.host_bytes,
                                             sections.device_hot_bytes};
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    mapped_.sections[i].begin = mapped_.bytes;
    mapped_.sections[i].bytes = static_cast<std::size_t>(bytes[i]);
    mapped_.bytes += mapped_.sections[i].bytes;
  }
  const CUresult result = driver.reserve(&mapped_.base, mapped_.bytes, 0, 0, 0);
  if (result != CUDA_SUCCESS) mapped_.base = 0;
  DISTMOE_CHECK(result == CUDA_SUCCESS, kOutOfMemory, "the context needs ", mapped_.bytes,
                " bytes of addresses in one piece (cuMemAddressReserve: error ", int{result}, ")");
  for (Section& section : mapped_.sections) section.begin += mapped_.base;
  auto& [prefix, host, hot] = mapped_.sections;
  try {
    map_section(prefix, device_memory(place_));
    map_section(hot, device_memory(place_));
    if (!maps_host_later) {
      map_section(host, host_pages(place_));
      return;
    }
    host_pages_ = std::async(std::launch::async, [this, &host] {
      cudaSetDevice(place_.device);
      map_section(host, host_pages(place_));
    });
  } catch (...) {
    give_back();
    throw;
  }
}

VirtualRange::~VirtualRange() {
  if (host_pages_.valid()) host_pages_.wait();
  give_back();
}

void VirtualRange::wait() {
  if (host_pages_.valid()) host_pages_.get();
}

void VirtualRange::map_section(Section& section, CUmemLocation location) {
  if (section.bytes == 0) return;
  const bool is_host = location.type != CU_MEM_LOCATION_TYPE_DEVICE;
  const auto check = [&](CUresult result, const char* function) {
    DISTMOE_CHECK(result == CUDA_SUCCESS, kOutOfMemory, "the context needs ", section.bytes,
                  is_host ? " bytes of the host's memory for host scratch ("
                          : " bytes of device memory in one piece (",
                  function, ": error ", int{result}, "); a smaller max_tokens",
                  is_host ? " or total_scratch_capacity_factor" : "",
                  is_host ? "" : " or device_scratch_capacity_factor", " needs less");
  };
  const VirtualMemoryDriver& driver = mapped_.driver;
  const CUmemAllocationProp properties = allocation_at(location);
  check(driver.create(&section.handle, section.bytes, &properties, 0), "cuMemCreate");
  section.is_created = true;
  check(driver.map(section.begin, section.bytes, 0, section.handle, 0), "cuMemMap");
  section.is_mapped = true;
  const CUmemAccessDesc access{.location = device_memory(place_),
                               .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  check(driver.set_access(section.begin, section.bytes, &access, 1), "cuMemSetAccess");
}

bool VirtualRange::Mapped::give_back() {
  bool is_all = true;
  const auto is_taken = [&](CUresult result) {
    is_all = is_all && result == CUDA_SUCCESS;
    return result == CUDA_SUCCESS;
  };
  for (Section& section : sections) {
    if (section.is_mapped)
      section.is_mapped = !is_taken(driver.unmap(section.begin, section.bytes));
    if (section.is_created && !section.is_mapped) {
      section.is_created = !is_taken(driver.release(section.handle));
    }
  }
  if (is_all && base != 0 && is_taken(driver.free(base, bytes))) base = 0;
  return is_all;
}

void VirtualRange::give_back() {
  LeftBehind& left = LeftBehind::of_process();
  left.offer_again();
  if (mapped_.give_back()) return;
  log(LogLevel::kWarning,
      concat("the CUDA driver did not take back ", mapped_.bytes,
             " bytes of addresses of a closed context; they are offered again whenever a context "
             "with host scratch is created or closed"));
  const std::scoped_lock lock(left.mutex);
  left.ranges.push_back(mapped_);
}

}  // namespace distmoe::cuda
