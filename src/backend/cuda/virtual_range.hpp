// SPDX-License-Identifier: Apache-2.0
//
// One range of addresses over device memory and pages of the host (CUDA virtual memory management):
//
//   [ device prefix | host pages | device hot ]
#pragma once

#include <cuda.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <future>

#include "distmoe/memory_plan.hpp"

namespace distmoe::cuda {

/// The driver's functions that a range is made of; a test gives its own.
struct VirtualMemoryDriver {
  CUresult (*granularity)(std::size_t*, const CUmemAllocationProp*,
                          CUmemAllocationGranularity_flags) = nullptr;
  CUresult (*reserve)(CUdeviceptr*, std::size_t, std::size_t, CUdeviceptr,
                      unsigned long long) = nullptr;
  CUresult (*free)(CUdeviceptr, std::size_t) = nullptr;
  CUresult (*create)(CUmemGenericAllocationHandle*, std::size_t, const CUmemAllocationProp*,
                     unsigned long long) = nullptr;
  CUresult (*release)(CUmemGenericAllocationHandle) = nullptr;
  CUresult (*map)(CUdeviceptr, std::size_t, std::size_t, CUmemGenericAllocationHandle,
                  unsigned long long) = nullptr;
  CUresult (*unmap)(CUdeviceptr, std::size_t) = nullptr;
  CUresult (*set_access)(CUdeviceptr, std::size_t, const CUmemAccessDesc*, std::size_t) = nullptr;
};

/// The installed driver's; throws unsupported where it has none.
VirtualMemoryDriver find_virtual_memory_driver();

/// A device, and the NUMA node of the host whose pages it uses.
struct RangePlace {
  int device = 0;
  int host_node = 0;
};

/// Throws unsupported where the device cannot map pages of the host.
RangePlace find_range_place(int device);

/// Bytes that all sections are multiples of.
std::int64_t range_granularity(const VirtualMemoryDriver& driver, const RangePlace& place);

/// Owns a range and what is mapped there.
class VirtualRange {
 public:
  /// Maps the device's sections now and the host's pages too, or with `maps_host_later` on a thread
  /// of its own, until wait(). Throws out_of_memory with what was asked for; nothing is left then.
  VirtualRange(const VirtualMemoryDriver& driver, const RangePlace& place,
               const PhysicalSections& sections, bool maps_host_later);
  /// Gives all back. What the driver refuses to take back is kept and offered again whenever a
  /// range is made or given back, see num_left_behind().
  ~VirtualRange();
  VirtualRange(const VirtualRange&) = delete;
  VirtualRange& operator=(const VirtualRange&) = delete;

  // NOLINTNEXTLINE(performance-no-int-to-ptr): the driver's addresses are integers
  std::byte* base() const { return reinterpret_cast<std::byte*>(mapped_.base); }
  /// Until the host's pages are mapped; throws what went wrong there.
  void wait();

  /// Ranges of this process that the driver has not taken back yet.
  static std::size_t num_left_behind();

 private:
  struct Section {
    CUmemGenericAllocationHandle handle = 0;
    CUdeviceptr begin = 0;
    std::size_t bytes = 0;
    bool is_created = false;
    bool is_mapped = false;
  };
  /// What is to be given back.
  struct Mapped {
    VirtualMemoryDriver driver;
    CUdeviceptr base = 0;
    std::size_t bytes = 0;
    std::array<Section, 3> sections{};

    /// As much as the driver takes; whether that is all.
    bool give_back();
  };
  struct LeftBehind;

  void map_section(Section& section, CUmemLocation location);
  void give_back();

  RangePlace place_;
  Mapped mapped_;
  std::future<void> host_pages_;
};

}  // namespace distmoe::cuda
