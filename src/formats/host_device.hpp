// SPDX-License-Identifier: Apache-2.0
//
// The codecs of formats/ are one header for host and device; a CUDA compiler compiles them for
// both.
#pragma once

#if defined(__CUDACC__)
#define DISTMOE_HOST_DEVICE __host__ __device__
#else
#define DISTMOE_HOST_DEVICE
#endif
