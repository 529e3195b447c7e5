// SPDX-License-Identifier: Apache-2.0
//
// A sum of which every part is alive until the end, in kThreads threads a block: with 1024 threads
// and two blocks an SM a thread has 32 registers, fewer than there are parts.
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1
#endif

__global__ void __launch_bounds__(MIN_BLOCKS == 1 ? 128 : 1024, MIN_BLOCKS) sum(float* values) {
  constexpr int kParts = 64;
  float parts[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) parts[i] = values[i * blockDim.x + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    values[(kParts - 1 - i) * blockDim.x + threadIdx.x] = parts[i] * parts[(i * 7 + 3) % kParts];
  }
}
