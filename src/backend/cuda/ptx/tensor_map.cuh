// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstdint>

namespace distmoe::cuda::ptx {

/// Brings a tensor map that is a kernel's parameter near, before the first copy needs it.
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<std::uint64_t>(&map)) : "memory");
}

/// What is read once may leave L2 first.
__device__ __forceinline__ std::uint64_t evict_first_policy() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// A box of a tensor on its way to shared memory, under an L2 policy. CCCL's wrappers take none.
struct BoxCopy {
  std::uint32_t shared;   ///< address of the box
  std::uint32_t barrier;  ///< address of the mbarrier that counts its bytes
  std::uint64_t policy;
};
__device__ __forceinline__ void copy_box(const CUtensorMap& map, const std::int32_t (&at)[3],
                                         const BoxCopy& copy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(copy.shared),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(copy.barrier), "r"(at[0]), "r"(at[1]),
      "r"(at[2]), "l"(copy.policy)
      : "memory");
}
__device__ __forceinline__ void copy_box(const CUtensorMap& map, const std::int32_t (&at)[5],
                                         const BoxCopy& copy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(copy.shared),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(copy.barrier), "r"(at[0]), "r"(at[1]),
      "r"(at[2]), "r"(at[3]), "r"(at[4]), "l"(copy.policy)
      : "memory");
}

}  // namespace distmoe::cuda::ptx
