// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "distmoe/memory_plan.hpp"

namespace distmoe::cuda {

/// The memory of a context on a device, exactly plan.allocated_bytes, cut into the regions of the
/// plan: the communication buffers in one allocation, which peers may address, the rest in another.
/// All of it is zero at first. The device is current in every call.
class DeviceMemory {
 public:
  /// Throws out_of_memory with what was asked and what is free.
  explicit DeviceMemory(const MemoryPlan& plan);

  std::byte* scratch() const { return private_.get() + plan_.total_activation_bytes; }
  /// The buffer of that name in the plan's lists; null where the plan has none.
  std::byte* buffer(std::string_view name) const;
  template <typename Element>
  Element* buffer_of(std::string_view name) const {
    return reinterpret_cast<Element*>(buffer(name));
  }
  std::uint64_t address(std::string_view name) const {
    return reinterpret_cast<std::uint64_t>(buffer(name));
  }
  std::byte* windows() const { return windows_.get(); }
  std::int64_t allocated_bytes() const { return plan_.allocated_bytes; }

 private:
  struct Free {
    void operator()(std::byte* base) const;
  };
  using Allocation = std::unique_ptr<std::byte, Free>;
  static Allocation allocate(std::int64_t bytes);

  MemoryPlan plan_;
  Allocation private_;
  Allocation windows_;
};

}  // namespace distmoe::cuda
