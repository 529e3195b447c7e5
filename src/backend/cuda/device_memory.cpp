// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/device_memory.hpp"

#include <cuda_runtime_api.h>

#include "backend/cuda/cuda_check.hpp"
#include "core/check.hpp"

namespace distmoe::cuda {
void FreeDeviceMemory::operator()(std::byte* base) const {
  if (symmetric != nullptr) {
    symmetric->free(base);
    return;
  }
  int current = device;
  cudaGetDevice(&current);
  cudaSetDevice(device);
  cudaFree(base);
  cudaSetDevice(current);
}

DeviceMemory::Allocation DeviceMemory::allocate(std::int64_t bytes) {
  if (bytes == 0) return nullptr;
  void* base = nullptr;
  if (const cudaError_t error = cudaMalloc(&base, static_cast<std::size_t>(bytes))) {
    cudaGetLastError();
    DISTMOE_CHECK(error != cudaErrorStreamCaptureUnsupported, kUnsupported,
                  "a stream is being captured into a CUDA graph (and the capture is void now): a "
                  "context allocates memory and is created before the capture begins");
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    cudaMemGetInfo(&free_bytes, &total_bytes);
    throw_error(ErrorCode::kOutOfMemory,
                concat("the context needs ", bytes, " bytes of device memory in one piece; ",
                       free_bytes, " of ", total_bytes,
                       " are free; a smaller max_tokens or device_scratch_capacity_factor needs "
                       "less"));
  }
  FreeDeviceMemory free;
  DISTMOE_CUDA_CHECK(cudaGetDevice(&free.device));
  return Allocation(static_cast<std::byte*>(base), free);
}

DeviceMemory::DeviceMemory(const MemoryPlan& plan, SymmetricMemory* symmetric,
                           bool prefetches_host_scratch)
    : plan_(plan), symmetric_(symmetric) {
  if (plan.host_scratch_bytes == 0) {
    private_ = allocate(plan.allocated_bytes - plan.communication_bytes);
  } else {
    int device = 0;
    DISTMOE_CUDA_CHECK(cudaGetDevice(&device));
    const VirtualMemoryDriver driver = find_virtual_memory_driver();
    const RangePlace place = find_range_place(device);
    range_.emplace(driver, place, physical_sections(plan, range_granularity(driver, place)),
                   prefetches_host_scratch);
  }
  if (symmetric_ == nullptr) {
    windows_ = allocate(plan.communication_bytes);
    clear_windows();
  }
  // Epochs start at zero; what is computed is written before it is read.
  for (const PlanBuffer& control : plan.control_buffers) {
    DISTMOE_CUDA_CHECK(
        cudaMemset(buffer(control.name), 0, static_cast<std::size_t>(control.bytes)));
  }
  DISTMOE_CUDA_CHECK(cudaDeviceSynchronize());
}

void DeviceMemory::wait_for_host_scratch() {
  if (range_) range_->wait();
}

void DeviceMemory::allocate_windows() {
  if (symmetric_ == nullptr || plan_.communication_bytes == 0) return;
  void* base = symmetric_->allocate(static_cast<std::size_t>(plan_.communication_bytes));
  windows_.reset(static_cast<std::byte*>(base), FreeDeviceMemory{.symmetric = symmetric_});
  clear_windows();
}

/// Flags start at zero.
void DeviceMemory::clear_windows() {
  DISTMOE_CUDA_CHECK(
      cudaMemset(windows_.get(), 0, static_cast<std::size_t>(plan_.communication_bytes)));
  DISTMOE_CUDA_CHECK(cudaDeviceSynchronize());
}

std::int64_t DeviceMemory::bytes_of(std::string_view name) const {
  for (const auto* list : {&plan_.communication_buffers, &plan_.metadata_buffers,
                           &plan_.control_buffers, &plan_.workspace_buffers}) {
    for (const PlanBuffer& candidate : *list) {
      if (candidate.name == name) return candidate.bytes;
    }
  }
  return 0;
}

std::byte* DeviceMemory::buffer(std::string_view name) const {
  std::byte* next = windows_.get();
  for (const PlanBuffer& candidate : plan_.communication_buffers) {
    if (candidate.name == name) return next;
    next += candidate.bytes;
  }
  next = activations() + activation_bytes();
  for (const auto* list :
       {&plan_.metadata_buffers, &plan_.control_buffers, &plan_.workspace_buffers}) {
    for (const PlanBuffer& candidate : *list) {
      if (candidate.name == name) return next;
      next += candidate.bytes;
    }
  }
  return nullptr;
}

}  // namespace distmoe::cuda
