// SPDX-License-Identifier: Apache-2.0
//
// wgmma m64nNk16, BF16 operands in shared memory with 128-byte swizzle, FP32 accumulators. K-major:
// a 128-byte row holds 64 elements of k of one row or column; transposed (MN-major): 64
// neighbouring rows or columns of one k. CCCL has no wrapper for it. The instruction takes N as an
// immediate and every accumulator as an operand, so that operand lists are built by macros that end
// with this file.
#pragma once

#include <cstdint>

namespace distmoe::cuda::ptx {

/// Orders the registers and shared memory of this warpgroup before the wgmmas that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most `kPending` committed groups of this warpgroup run.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Matrix descriptor of a tile of 128-byte rows (64 BF16) at a multiple of 1024 bytes: eight rows
/// form one swizzle atom, atoms follow each other. A K step of 16 moves the address by 32 bytes.
__device__ __forceinline__ std::uint64_t swizzled_descriptor(std::uint32_t shared_address) {
  constexpr std::uint64_t kSwizzle128 = 1ull << 62;
  constexpr std::uint64_t kAtomStride = std::uint64_t{1024 >> 4} << 32;
  constexpr std::uint64_t kIgnoredLeadingStride = 1ull << 16;
  return kSwizzle128 | kAtomStride | kIgnoredLeadingStride | ((shared_address & 0x3FFFF) >> 4);
}

/// Matrix descriptor of a transposed operand: 64 columns of 128-byte rows, one a k, at a multiple
/// of 1024 bytes; further columns lie `block_stride` bytes on. A K step of 16 moves the address by
/// 2048 bytes.
__device__ __forceinline__ std::uint64_t transposed_descriptor(std::uint32_t shared_address,
                                                               std::uint32_t block_stride) {
  constexpr std::uint64_t kSwizzle128 = 1ull << 62;
  constexpr std::uint64_t kAtomStride = std::uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kAtomStride | std::uint64_t{block_stride >> 4} << 16 |
         ((shared_address & 0x3FFFF) >> 4);
}

/// d[64, kN] += a[64, 16] b[kN, 16]^T. Thread t of the warpgroup holds in
/// d[4j + 2h + i] row 16 (t / 32) + (t % 32) / 4 + 8h, column 8j + 2 (t % 4) + i.
template <int kN>
struct Wgmma;

#define DISTMOE_OUT_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define DISTMOE_OUT_16(d, i) \
  DISTMOE_OUT_4(d, i), DISTMOE_OUT_4(d, i + 4), DISTMOE_OUT_4(d, i + 8), DISTMOE_OUT_4(d, i + 12)
#define DISTMOE_REGS_4 "%0, %1, %2, %3"
#define DISTMOE_OUTS_4(d) DISTMOE_OUT_4(d, 0)
#define DISTMOE_REGS_8 DISTMOE_REGS_4 ", %4, %5, %6, %7"
#define DISTMOE_OUTS_8(d) DISTMOE_OUT_4(d, 0), DISTMOE_OUT_4(d, 4)
#define DISTMOE_REGS_16 DISTMOE_REGS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define DISTMOE_OUTS_16(d) DISTMOE_OUT_16(d, 0)
#define DISTMOE_REGS_24 DISTMOE_REGS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define DISTMOE_OUTS_24(d) DISTMOE_OUT_16(d, 0), DISTMOE_OUT_4(d, 16), DISTMOE_OUT_4(d, 20)
#define DISTMOE_REGS_32 DISTMOE_REGS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define DISTMOE_OUTS_32(d) DISTMOE_OUT_16(d, 0), DISTMOE_OUT_16(d, 16)
#define DISTMOE_REGS_36 DISTMOE_REGS_32 ", %32, %33, %34, %35"
#define DISTMOE_OUTS_36(d) DISTMOE_OUT_16(d, 0), DISTMOE_OUT_16(d, 16), DISTMOE_OUT_4(d, 32)
#define DISTMOE_REGS_40 DISTMOE_REGS_36 ", %36, %37, %38, %39"
#define DISTMOE_OUTS_40(d) \
  DISTMOE_OUT_16(d, 0), DISTMOE_OUT_16(d, 16), DISTMOE_OUT_4(d, 32), DISTMOE_OUT_4(d, 36)
#define DISTMOE_REGS_44 DISTMOE_REGS_40 ", %40, %41, %42, %43"
#define DISTMOE_OUTS_44(d)                                                                 \
  DISTMOE_OUT_16(d, 0), DISTMOE_OUT_16(d, 16), DISTMOE_OUT_4(d, 32), DISTMOE_OUT_4(d, 36), \
      DISTMOE_OUT_4(d, 40)
#define DISTMOE_REGS_48 DISTMOE_REGS_44 ", %44, %45, %46, %47"
#define DISTMOE_OUTS_48(d) DISTMOE_OUT_16(d, 0), DISTMOE_OUT_16(d, 16), DISTMOE_OUT_16(d, 32)
#define DISTMOE_REGS_52 DISTMOE_REGS_48 ", %48, %49, %50, %51"
#define DISTMOE_OUTS_52(d) \
  DISTMOE_OUT_16(d, 0), DISTMOE_OUT_16(d, 16), DISTMOE_OUT_16(d, 32), DISTMOE_OUT_4(d, 48)
#define DISTMOE_REGS_56 DISTMOE_REGS_52 ", %52, %53, %54, %55"
#define DISTMOE_OUTS_56(d)                                                                  \
  DISTMOE_OUT_16(d, 0), DISTMOE_OUT_16(d, 16), DISTMOE_OUT_16(d, 32), DISTMOE_OUT_4(d, 48), \
      DISTMOE_OUT_4(d, 52)
#define DISTMOE_REGS_60 DISTMOE_REGS_56 ", %56, %57, %58, %59"
#define DISTMOE_OUTS_60(d)                                                                  \
  DISTMOE_OUT_16(d, 0), DISTMOE_OUT_16(d, 16), DISTMOE_OUT_16(d, 32), DISTMOE_OUT_4(d, 48), \
      DISTMOE_OUT_4(d, 52), DISTMOE_OUT_4(d, 56)
#define DISTMOE_REGS_64 DISTMOE_REGS_60 ", %60, %61, %62, %63"
#define DISTMOE_OUTS_64(d) \
  DISTMOE_OUT_16(d, 0), DISTMOE_OUT_16(d, 16), DISTMOE_OUT_16(d, 32), DISTMOE_OUT_16(d, 48)
#define DISTMOE_REGS_68 DISTMOE_REGS_64 ", %64, %65, %66, %67"
#define DISTMOE_OUTS_68(d)                                                                   \
  DISTMOE_OUT_16(d, 0), DISTMOE_OUT_16(d, 16), DISTMOE_OUT_16(d, 32), DISTMOE_OUT_16(d, 48), \
      DISTMOE_OUT_4(d, 64)
#define DISTMOE_REGS_72 DISTMOE_REGS_68 ", %68, %69, %70, %71"
#define DISTMOE_OUTS_72(d)                                                                   \
  DISTMOE_OUT_16(d, 0), DISTMOE_OUT_16(d, 16), DISTMOE_OUT_16(d, 32), DISTMOE_OUT_16(d, 48), \
      DISTMOE_OUT_4(d, 64), DISTMOE_OUT_4(d, 68)
#define DISTMOE_REGS_76 DISTMOE_REGS_72 ", %72, %73, %74, %75"
#define DISTMOE_OUTS_76(d)                                                                   \
  DISTMOE_OUT_16(d, 0), DISTMOE_OUT_16(d, 16), DISTMOE_OUT_16(d, 32), DISTMOE_OUT_16(d, 48), \
      DISTMOE_OUT_4(d, 64), DISTMOE_OUT_4(d, 68), DISTMOE_OUT_4(d, 72)
#define DISTMOE_REGS_80 DISTMOE_REGS_76 ", %76, %77, %78, %79"

#define DISTMOE_WGMMA(N, R, A, B, TA, TB)                                                         \
  template <>                                                                                     \
  struct Wgmma<N> {                                                                               \
    template <int kTransposedA = 0, int kTransposedB = 0>                                         \
    static __device__ __forceinline__ void run(float (&d)[R], std::uint64_t a, std::uint64_t b) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" DISTMOE_REGS_##R  \
                   "}, %" #A ", %" #B ", 1, 1, 1, %" #TA ", %" #TB ";"                            \
                   : DISTMOE_OUTS_##R(d)                                                          \
                   : "l"(a), "l"(b), "n"(kTransposedA), "n"(kTransposedB));                       \
    }                                                                                             \
  }

DISTMOE_WGMMA(8, 4, 4, 5, 6, 7);
DISTMOE_WGMMA(16, 8, 8, 9, 10, 11);
DISTMOE_WGMMA(32, 16, 16, 17, 18, 19);
DISTMOE_WGMMA(48, 24, 24, 25, 26, 27);
DISTMOE_WGMMA(64, 32, 32, 33, 34, 35);
DISTMOE_WGMMA(72, 36, 36, 37, 38, 39);
DISTMOE_WGMMA(80, 40, 40, 41, 42, 43);
DISTMOE_WGMMA(88, 44, 44, 45, 46, 47);
DISTMOE_WGMMA(96, 48, 48, 49, 50, 51);
DISTMOE_WGMMA(104, 52, 52, 53, 54, 55);
DISTMOE_WGMMA(112, 56, 56, 57, 58, 59);
DISTMOE_WGMMA(120, 60, 60, 61, 62, 63);
DISTMOE_WGMMA(128, 64, 64, 65, 66, 67);
DISTMOE_WGMMA(136, 68, 68, 69, 70, 71);
DISTMOE_WGMMA(144, 72, 72, 73, 74, 75);
DISTMOE_WGMMA(152, 76, 76, 77, 78, 79);

#undef DISTMOE_WGMMA
#undef DISTMOE_OUTS_4
#undef DISTMOE_REGS_4
#undef DISTMOE_OUTS_8
#undef DISTMOE_REGS_8
#undef DISTMOE_OUTS_16
#undef DISTMOE_REGS_16
#undef DISTMOE_OUTS_24
#undef DISTMOE_REGS_24
#undef DISTMOE_OUTS_32
#undef DISTMOE_REGS_32
#undef DISTMOE_OUTS_36
#undef DISTMOE_REGS_36
#undef DISTMOE_OUTS_40
#undef DISTMOE_REGS_40
#undef DISTMOE_OUTS_44
#undef DISTMOE_REGS_44
#undef DISTMOE_OUTS_48
#undef DISTMOE_REGS_48
#undef DISTMOE_OUTS_52
#undef DISTMOE_REGS_52
#undef DISTMOE_OUTS_56
#undef DISTMOE_REGS_56
#undef DISTMOE_OUTS_60
#undef DISTMOE_REGS_60
#undef DISTMOE_OUTS_64
#undef DISTMOE_REGS_64
#undef DISTMOE_OUTS_68
#undef DISTMOE_REGS_68
#undef DISTMOE_OUTS_72
#undef DISTMOE_REGS_72
#undef DISTMOE_OUTS_76
#undef DISTMOE_REGS_76
#undef DISTMOE_OUT_16
#undef DISTMOE_OUT_4

}  // namespace distmoe::cuda::ptx
