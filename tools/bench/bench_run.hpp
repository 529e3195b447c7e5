// SPDX-License-Identifier: Apache-2.0
//
// One rank of `distmoe bench`: plans and places all rows, measures them and the ceilings in turn,
// checks what was timed and, on the first rank, reports for all.
#pragma once

#include <memory>

#include "bench/bench_options.hpp"
#include "bench/layer_values.hpp"
#include "distmoe/communicator.hpp"
#include "rank_launch.hpp"

namespace distmoe::tools {

/// Collective, and a RankBody. `values` is this process's.
RankOutcome run_bench_rank(const BenchOptions& options,
                           const std::shared_ptr<Communicator>& communicator,
                           SharedLayerValues& values);

}  // namespace distmoe::tools
