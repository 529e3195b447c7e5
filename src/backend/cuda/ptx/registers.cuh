// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace distmoe::cuda::ptx {

/// Takes or gives back registers of this warpgroup, all of whose warps call it.
template <int kRegisters>
__device__ __forceinline__ void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace distmoe::cuda::ptx
