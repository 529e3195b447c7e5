// SPDX-License-Identifier: Apache-2.0
//
// From the samples of a run to the figures of its report.
#pragma once

#include <optional>
#include <vector>

#include "bench/bench_call.hpp"
#include "bench/bench_case.hpp"
#include "bench/bench_report.hpp"
#include "bench/traffic.hpp"

namespace distmoe::tools {

/// One sample a round, of the slowest rank: microseconds, or microseconds per unit of work of a
/// ceiling. All 0 where nobody measured.
using Samples = std::vector<double>;

struct CeilingSamples {
  Samples dense;  ///< per floating-point operation
  Samples copy;   ///< per byte
  Samples read;
  Samples write;
  Samples link;
};

struct RowSamples {
  Samples us;
  Samples bound;      ///< per floating-point operation
  Samples forward{};  ///< of a mode that trains, like backward
  Samples backward{};
  Samples restore{};  ///< a part of backward
  std::vector<Samples> steps{};
  std::vector<Samples> peers{};
};

/// The median over the rounds of one sample divided by another of the same round; empty where a
/// divisor is 0.
std::optional<double> ratio_of(const Samples& samples, const Samples& divisors);

/// Of a whole device or machine, in the fastest tenth of the rounds: what it can do, however busy
/// it was in others.
MachineRates rates_of(const CeilingSamples& samples);
BenchCeilings ceilings_of(const MachineRates& rates);

/// `ranks_per_device` ranks share the rates. A dense product of the row's own FLOPs that is faster
/// than the large one is the ceiling of its floor. Steps and peers get no names.
BenchRow summarize_row(const BenchCase& plan, BenchMode mode, const RowSamples& samples,
                       const CallCheck& check, const MachineRates& rates, int ranks_per_device);

}  // namespace distmoe::tools
