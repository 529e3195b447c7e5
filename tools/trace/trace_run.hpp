// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <memory>

#include "bench/bench_options.hpp"
#include "bench/layer_values.hpp"
#include "distmoe/communicator.hpp"
#include "rank_launch.hpp"

namespace distmoe::tools {

/// One rank of `distmoe trace`: makes `options.rounds` calls that nobody watches and one whose
/// steps are marked. The first rank writes `output`. Never throws.
RankOutcome run_trace_rank(const BenchOptions& options, const std::filesystem::path& output,
                           const std::shared_ptr<Communicator>& communicator,
                           SharedLayerValues& values);

}  // namespace distmoe::tools
