// SPDX-License-Identifier: Apache-2.0
//
// Copies between registers, global and shared memory that CCCL does not wrap.
#pragma once

#include <cstdint>

namespace distmoe::cuda::ptx {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Starts a copy of 16 bytes; `source_bytes` 0 writes zeros and reads nothing.
__device__ __forceinline__ void cp_async_16(std::uint32_t shared, std::uint64_t global,
                                            std::uint32_t source_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(source_bytes)
               : "memory");
}

/// Arrives at `barrier` once this thread's earlier cp.asyncs are complete; the arrival is one of
/// those that the barrier was initialised for.
__device__ __forceinline__ void cp_async_arrive(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

/// Stores four 8x8 matrices of 16-bit elements transposed: lane l gives the address of column l % 8
/// of matrix l / 8, whose eight elements become 16 contiguous bytes.
__device__ __forceinline__ void stmatrix_x4_trans(std::uint32_t shared, std::uint32_t r0,
                                                  std::uint32_t r1, std::uint32_t r2,
                                                  std::uint32_t r3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
      "r"(r0), "r"(r1), "r"(r2), "r"(r3)
      : "memory");
}

/// The same as they are: lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(std::uint32_t shared, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

/// The inverse: four 8x8 matrices, lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(std::uint32_t shared, std::uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void store_shared_8(std::uint32_t shared, float low, float high) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(low), "f"(high) : "memory");
}
__device__ __forceinline__ void store_shared_4(std::uint32_t shared, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared), "f"(value) : "memory");
}

__device__ __forceinline__ float2 load_shared_8(std::uint32_t shared) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(shared)
               : "memory");
  return value;
}
__device__ __forceinline__ uint4 load_shared_16(std::uint32_t shared) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(shared)
               : "memory");
  return value;
}

}  // namespace distmoe::cuda::ptx
