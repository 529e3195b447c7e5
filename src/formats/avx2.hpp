// SPDX-License-Identifier: Apache-2.0
//
// What functions with AVX2 intrinsics are compiled for, and whether this processor runs them. For
// x86-64 and compilers of GCC's kind alone.
#pragma once

#define DISTMOE_AVX2 __attribute__((target("avx2,fma")))

namespace distmoe {

inline bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

}  // namespace distmoe
