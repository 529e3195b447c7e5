// SPDX-License-Identifier: Apache-2.0
//
// What functions with AVX-512 intrinsics are compiled for, and whether this processor runs them.
// For x86-64 and compilers of GCC's kind alone.
#pragma once

#define DISTMOE_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))

namespace distmoe {

inline bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl");
}

}  // namespace distmoe
