// SPDX-License-Identifier: Apache-2.0
//
// In place of comm/nccl/gpu.cpp: one GPU whose memory is the host's, for tests of the NCCL engine
// on machines that have none.
#include "comm/nccl/gpu.hpp"

#include <cstring>

namespace distmoe::nccl {

GpuId id_of_gpu(int) { return {}; }
void use_gpu(int) {}
int current_gpu() { return 0; }
bool is_device_memory(const void*) { return true; }
void write_gpu(void* address, std::span<const std::byte> bytes) {
  std::memcpy(address, bytes.data(), bytes.size());
}
void read_gpu(const void* address, std::span<std::byte> bytes) {
  std::memcpy(bytes.data(), address, bytes.size());
}
std::size_t free_gpu_bytes() { return 0; }

}  // namespace distmoe::nccl
