// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace distmoe {

/// Which cores this process may use, as far as ranks must know to share them fairly.
struct CoreShare {
  std::uint64_t fingerprint = 0;  ///< equal where ranks compete: same machine, same set of cores
  int num_cores = 1;
};

CoreShare cores_of_this_process();

}  // namespace distmoe
