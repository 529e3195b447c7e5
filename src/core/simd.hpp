// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Compiles a function once per vector extension and picks at load time. The clones agree bit by
/// bit: contraction to FMA is off and every loop is elementwise.
// NOTE: sanitizers instrument the resolver of a clone, which runs before their own start-up.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(DISTMOE_SANITIZED)
#define DISTMOE_SIMD_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define DISTMOE_SIMD_CLONES
#endif
