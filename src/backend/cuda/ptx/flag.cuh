// SPDX-License-Identifier: Apache-2.0
//
// Flags in global memory between blocks of one device or of several, and the clock that bounds
// waits for them.
#pragma once

#include <cuda/ptx>

#include <cstdint>

namespace distmoe::cuda::ptx {

__device__ __forceinline__ std::uint32_t load_acquire_gpu(const std::uint32_t* flag) {
  std::uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ void store_release_gpu(std::uint32_t* flag, std::uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ std::uint32_t load_acquire_sys(const std::uint32_t* flag) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ void store_release_sys(std::uint32_t* flag, std::uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
/// Adds; what this thread saw of others' writes is visible to who acquires the sum.
__device__ __forceinline__ void add_release_gpu(std::uint32_t* count, std::uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(count), "r"(value) : "memory");
}
/// The same; returns the count before, and acquires what those who added before released.
__device__ __forceinline__ std::uint32_t add_acquire_release_gpu(std::uint32_t* count,
                                                                 std::uint32_t value) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(count), "r"(value)
               : "memory");
  return before;
}
/// Brings a line of global memory near; a hint.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
}
__device__ __forceinline__ std::uint64_t global_timer_ns() {
  return ::cuda::ptx::get_sreg_globaltimer();
}

}  // namespace distmoe::cuda::ptx
