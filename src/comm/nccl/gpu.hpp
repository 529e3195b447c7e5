// SPDX-License-Identifier: Apache-2.0
//
// What the engine itself asks of a GPU.
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace distmoe::nccl {

/// The same in every process and on every host.
using GpuId = std::array<char, 16>;

/// Throws device_fault or unsupported where there is no such device.
GpuId id_of_gpu(int device);
/// Makes the device current for this thread.
void use_gpu(int device);
int current_gpu();
/// Whether this GPU can read the address as its own memory.
bool is_device_memory(const void* address);
/// Both complete before they return.
void write_gpu(void* address, std::span<const std::byte> bytes);
void read_gpu(const void* address, std::span<std::byte> bytes);
std::size_t free_gpu_bytes();

}  // namespace distmoe::nccl
