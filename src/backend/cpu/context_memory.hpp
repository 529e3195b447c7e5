// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "distmoe/memory_plan.hpp"

namespace distmoe::cpu {

/// The memory of a context on the CPU: one allocation of exactly plan.allocated_bytes, cut into the
/// regions of the plan in its order. Pages come into being when they are first written.
class ContextMemory {
 public:
  /// Throws out_of_memory with the size.
  explicit ContextMemory(const MemoryPlan& plan);
  ~ContextMemory();
  ContextMemory(const ContextMemory&) = delete;
  ContextMemory& operator=(const ContextMemory&) = delete;

  /// [slots | host scratch | device scratch].
  std::span<std::byte> activations() const {
    return {base_, static_cast<std::size_t>(plan_.total_virtual_bytes)};
  }
  /// The buffer of that name in the plan's lists; empty where the plan has none.
  std::span<std::byte> buffer(std::string_view name) const;
  /// The same as elements of a type, as many as fit.
  template <typename Element>
  std::span<Element> buffer_of(std::string_view name) const {
    const std::span<std::byte> bytes = buffer(name);
    return {reinterpret_cast<Element*>(bytes.data()), bytes.size() / sizeof(Element)};
  }
  /// What was mapped.
  std::int64_t allocated_bytes() const { return end_; }

 private:
  std::int64_t end_of_buffers() const;

  MemoryPlan plan_;
  std::int64_t end_;  ///< of the last region
  std::byte* base_ = nullptr;
};

}  // namespace distmoe::cpu
