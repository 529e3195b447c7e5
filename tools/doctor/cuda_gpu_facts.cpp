// SPDX-License-Identifier: Apache-2.0
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "backend/cuda/device.hpp"
#include "doctor/gpu_facts.hpp"

namespace distmoe::tools {
namespace {

int attribute_of(cudaDeviceAttr attribute, int device) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess) cudaGetLastError();
  return value;
}

/// The run-time library has no such attribute: the driver is asked.
bool has_virtual_memory(int device) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuDeviceGetAttribute", &function,
                                                             12000, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return false;
  }
  using GetAttribute = CUresult (*)(int*, CUdevice_attribute, CUdevice);
  int value = 0;
  return reinterpret_cast<GetAttribute>(function)(
             &value, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device) ==
             CUDA_SUCCESS &&
         value != 0;
}

std::vector<int> peers_of(int device, int num_devices) {
  std::vector<int> peers;
  for (int peer = 0; peer < num_devices; ++peer) {
    int can = 0;
    if (peer == device) continue;
    if (cudaDeviceCanAccessPeer(&can, device, peer) != cudaSuccess) cudaGetLastError();
    if (can != 0) peers.push_back(peer);
  }
  return peers;
}

std::string pinned_problem() {
  constexpr std::size_t kBytes = std::size_t{1} << 20;
  void* memory = nullptr;
  if (const cudaError_t error = cudaHostAlloc(&memory, kBytes, cudaHostAllocDefault);
      error != cudaSuccess) {
    cudaGetLastError();
    return cudaGetErrorString(error);
  }
  cudaFreeHost(memory);
  return {};
}

}  // namespace

void ask_driver(GpuFacts& facts) {
  if (cudaDriverGetVersion(&facts.driver_cuda) != cudaSuccess) cudaGetLastError();
  if (cudaRuntimeGetVersion(&facts.runtime_cuda) != cudaSuccess) cudaGetLastError();
  const int num_devices = cuda::device_count();
  for (int device = 0; device < num_devices; ++device) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) cudaGetLastError();
    facts.gpus.push_back({.name = properties.name,
                          .major = attribute_of(cudaDevAttrComputeCapabilityMajor, device),
                          .minor = attribute_of(cudaDevAttrComputeCapabilityMinor, device),
                          .memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem),
                          .has_virtual_memory = has_virtual_memory(device),
                          .peers = peers_of(device, num_devices)});
  }
  if (num_devices > 0) facts.pinned_problem = pinned_problem();
}

}  // namespace distmoe::tools
