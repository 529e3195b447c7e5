// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "backend/cuda/virtual_range.hpp"
#include "distmoe/communicator.hpp"
#include "distmoe/memory_plan.hpp"

namespace distmoe::cuda {

/// Gives memory back to where it came from. Windows may be freed by the thread of a peer.
struct FreeDeviceMemory {
  SymmetricMemory* symmetric = nullptr;
  int device = 0;
  void operator()(std::byte* base) const;
};

/// The memory of a context on a device, exactly plan.allocated_bytes, cut into the regions of the
/// plan: the communication buffers in one allocation, which peers may address, the rest in another,
/// or, with host scratch, in one range of addresses (physical_sections()). Windows and control are
/// zero at first. The device is current in every call.
class DeviceMemory {
 public:
  /// Throws out_of_memory with what was asked and what is free. The windows come from `symmetric`,
  /// with allocate_windows(); where it is null, they are ordinary memory and there at once.
  DeviceMemory(const MemoryPlan& plan, SymmetricMemory* symmetric, bool prefetches_host_scratch);

  /// Collective where the memory is symmetric.
  void allocate_windows();
  /// Until host scratch is there, which a thread may still map; before any call.
  void wait_for_host_scratch();

  /// Slots, then scratch.
  std::byte* activations() const { return range_ ? range_->base() : private_.get(); }
  std::int64_t activation_bytes() const { return plan_.total_virtual_bytes; }
  /// The buffer of that name in the plan's lists; null where the plan has none.
  std::byte* buffer(std::string_view name) const;
  /// Part `index` of the `count` equal ones of a buffer.
  template <typename Element>
  Element* part_of(std::string_view name, std::int64_t index, std::int64_t count) const {
    return reinterpret_cast<Element*>(buffer(name) + index * (bytes_of(name) / count));
  }
  template <typename Element>
  Element* buffer_of(std::string_view name) const {
    return reinterpret_cast<Element*>(buffer(name));
  }
  std::uint64_t address(std::string_view name) const {
    return reinterpret_cast<std::uint64_t>(buffer(name));
  }
  /// 0 where the plan has none.
  std::int64_t bytes_of(std::string_view name) const;
  /// Peers of this process hold them too.
  const std::shared_ptr<std::byte>& windows() const { return windows_; }
  std::int64_t allocated_bytes() const { return plan_.allocated_bytes; }

 private:
  using Allocation = std::unique_ptr<std::byte, FreeDeviceMemory>;
  static Allocation allocate(std::int64_t bytes);
  void clear_windows();

  MemoryPlan plan_;
  SymmetricMemory* symmetric_;
  Allocation private_;                 ///< or
  std::optional<VirtualRange> range_;  ///< with host scratch
  std::shared_ptr<std::byte> windows_;
};

}  // namespace distmoe::cuda
