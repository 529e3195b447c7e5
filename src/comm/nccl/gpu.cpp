// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/gpu.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "core/check.hpp"

namespace distmoe::nccl {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw_error(ErrorCode::kDeviceFault, concat("CUDA: ", cudaGetErrorString(error), " from ", what));
}

}  // namespace

GpuId id_of_gpu(int device) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  DISTMOE_CHECK(error == cudaSuccess, kUnsupported,
                "the NCCL engine needs a GPU: ", cudaGetErrorString(error));
  DISTMOE_CHECK(device >= 0 && device < count, kInvalidArgument, "there is no CUDA device ", device,
                "; legal: 0..", count - 1);
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  GpuId id{};
  std::copy_n(properties.uuid.bytes, id.size(), id.begin());
  return id;
}

void use_gpu(int device) { check(cudaSetDevice(device), "cudaSetDevice"); }

int current_gpu() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

bool is_device_memory(const void* address) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return attributes.type == cudaMemoryTypeDevice;
}

void write_gpu(void* address, std::span<const std::byte> bytes) {
  check(cudaMemcpy(address, bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "a write");
  // NOTE: from pageable memory cudaMemcpy returns once the bytes are staged.
  check(cudaStreamSynchronize(cudaStreamLegacy), "a write");
}

void read_gpu(const void* address, std::span<std::byte> bytes) {
  check(cudaMemcpy(bytes.data(), address, bytes.size(), cudaMemcpyDeviceToHost), "a read");
}

std::size_t free_gpu_bytes() {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
  return free_bytes;
}

}  // namespace distmoe::nccl
