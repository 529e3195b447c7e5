// SPDX-License-Identifier: Apache-2.0
#include "device_choice.hpp"

#include <algorithm>
#include <limits>

#include "backend/cuda/device.hpp"
#include "core/environment.hpp"
#include "option_values.hpp"

namespace distmoe::tools {

int device_of_thread(int rank) { return rank % std::max(cuda::device_count(), 1); }

int device_of_process(int rank) {
  const std::string text = launcher_environment().local_rank;
  if (text.empty()) return device_of_thread(rank);
  return device_of_thread(
      static_cast<int>(parse_integer("the local rank", text, 0, std::numeric_limits<int>::max())));
}

}  // namespace distmoe::tools
