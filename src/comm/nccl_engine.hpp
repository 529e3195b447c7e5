// SPDX-License-Identifier: Apache-2.0
//
// The NCCL engine adds memory that GPUs of several processes address to any communicator of the
// host. The NCCL library is loaded when it is asked for, so that nothing links it.
#pragma once

#include <string>

namespace distmoe {

/// Why make_nccl_communicator() would throw unsupported whatever its arguments: no CUDA in this
/// build, no NCCL library, or one that is too old. Empty where it would not.
std::string nccl_engine_problem();

/// "NCCL 2.28.9 from /usr/lib/x86_64-linux-gnu/libnccl.so.2"; empty where there is a problem.
std::string nccl_library_text();

}  // namespace distmoe
