// SPDX-License-Identifier: Apache-2.0
//
// Programmatic dependent launch: a kernel that was launched early may run before the kernels before
// it in the stream are done.
#pragma once

namespace distmoe::cuda::ptx {

/// Returns when all earlier kernels are done and their writes are visible to this thread. A kernel
/// that is launched early calls it in at least one thread of every block, also where it has nothing
/// to do: later kernels wait for this one alone.
__device__ __forceinline__ void wait_for_earlier_kernels() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

/// Lets the next kernel start, if it is launched early, when every block has said so or is done.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace distmoe::cuda::ptx
