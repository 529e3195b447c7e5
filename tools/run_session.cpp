// SPDX-License-Identifier: Apache-2.0
#include "run_session.hpp"

#include <memory>
#include <mutex>
#include <optional>

#include "memory_meter.hpp"
#include "rank_launch.hpp"
#include "rank_run.hpp"

namespace distmoe::tools {

ExitCode run_session(const RunOptions& options) {
  // What the transport took before the first rank began is not the run's.
  std::once_flag once;
  std::optional<MemoryMeter> meter;
  return launch_ranks(options.rank_setup(),
                      [&](const std::shared_ptr<Communicator>& communicator, int ranks_in_process) {
                        std::call_once(once, [&] { meter.emplace(); });
                        return run_rank(options, communicator, *meter, ranks_in_process);
                      });
}

}  // namespace distmoe::tools
