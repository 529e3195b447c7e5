// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/context_memory.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "core/check.hpp"

namespace distmoe::cpu {

ContextMemory::ContextMemory(const MemoryPlan& plan) : plan_(plan), end_(end_of_buffers()) {
  if (end_ == 0) return;
  // NOTE: without MAP_NORESERVE the kernel refuses what the machine can never hold at once, here,
  // where it is an error that the caller can read, instead of killing the process later.
  void* base = mmap(nullptr, static_cast<std::size_t>(end_), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  DISTMOE_CHECK(base != MAP_FAILED, kOutOfMemory, "the context needs ", end_,
                " bytes and the system does not give them (", std::strerror(errno),
                "); a smaller max_tokens or device_scratch_capacity_factor needs less");
  base_ = static_cast<std::byte*>(base);
}

ContextMemory::~ContextMemory() {
  if (base_ != nullptr) munmap(base_, static_cast<std::size_t>(end_));
}

std::int64_t ContextMemory::end_of_buffers() const {
  std::int64_t end = plan_.total_virtual_bytes;
  for (const auto* list : {&plan_.communication_buffers, &plan_.metadata_buffers,
                           &plan_.control_buffers, &plan_.workspace_buffers}) {
    for (const PlanBuffer& buffer : *list) end += buffer.bytes;
  }
  return end;
}

std::span<std::byte> ContextMemory::buffer(std::string_view name) const {
  std::int64_t offset = plan_.total_virtual_bytes;
  for (const auto* list : {&plan_.communication_buffers, &plan_.metadata_buffers,
                           &plan_.control_buffers, &plan_.workspace_buffers}) {
    for (const PlanBuffer& candidate : *list) {
      if (candidate.name == name)
        return {base_ + offset, static_cast<std::size_t>(candidate.bytes)};
      offset += candidate.bytes;
    }
  }
  return {};
}

}  // namespace distmoe::cpu
