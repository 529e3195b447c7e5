// SPDX-License-Identifier: Apache-2.0
#include "runtime/cores.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <string>
#include <string_view>

namespace distmoe {

CoreShare cores_of_this_process() {
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  std::string identity = host;
  CoreShare share;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) {
    share.num_cores = std::max(CPU_COUNT(&cores), 1);
    identity.append(reinterpret_cast<const char*>(&cores), sizeof(cores));
  }
  share.fingerprint = std::hash<std::string_view>()(identity);
  return share;
}

}  // namespace distmoe
