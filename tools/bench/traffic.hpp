// SPDX-License-Identifier: Apache-2.0
//
// What a call must compute, read and send, and how long that takes at the rates of a machine: the
// floor under every time.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "bench/bench_routing.hpp"
#include "bench/bench_shape.hpp"
#include "distmoe/config.hpp"

namespace distmoe::tools {

/// Of one call. Where ranks differ, of the rank that has most.
struct CallTraffic {
  double flops = 0.0;           ///< 6 D F for every route of a rank's tokens that is not disabled
  double weight_bytes = 0.0;    ///< of the experts that get a row, and of their gradients
  double gradient_bytes = 0.0;  ///< of them, those of gradients, which are written
  double link_bytes = 0.0;      ///< that cross to or from a rank, in the busier direction
  double dispatch_bytes = 0.0;  ///< of them, rows of x
  double return_bytes = 0.0;    ///< of them, results or sums
  double combine_bytes = 0.0;   ///< results of the rank's routes read, y written
  double output_bytes = 0.0;    ///< of them, those of y
  std::int64_t rows = 0;        ///< that a rank receives
};

/// Of an inference. `ranks` holds the tokens of every rank, T each. Low precisions read codes and
/// scales, and rows of x cross links as what their calls send.
CallTraffic count_traffic(const BenchShape& shape, std::span<const RoutedTokens> ranks,
                          Combine combine, Precision precision = Precision::kBF16);

/// The same of a saving forward and its backward: three times the FLOPs; every weight read by both
/// and its BF16 gradient written; x, results, dy and route gradients across links. What a backward
/// computes again is not counted.
CallTraffic count_training_traffic(const BenchShape& shape, std::span<const RoutedTokens> ranks,
                                   Combine combine, Precision precision = Precision::kBF16);

/// Rates of one rank's share of its machine, per second. Empty: not measured, or there is none.
struct MachineRates {
  std::optional<double> flops{};         ///< of a dense BF16 product
  std::optional<double> copied_bytes{};  ///< bytes read and bytes written by a copy, added
  std::optional<double> read_bytes{};
  std::optional<double> written_bytes{};
  std::optional<double> link_bytes{};  ///< one direction, while the other is as busy
};

/// The least microseconds for bytes of memory: those that are read at the rate of reading, those
/// that are written at the rate of writing, all of them at the fastest rate that was measured,
/// whichever takes longest. Empty where a rate that it needs is.
std::optional<double> memory_floor_us(double read, double written, const MachineRates& rates);

/// The largest of compute, weights with their gradients, and link, in microseconds. Empty where a
/// rate that it needs is.
std::optional<double> products_floor_us(const CallTraffic& traffic, const MachineRates& rates);
/// Rows of x across the link; empty where none cross one.
std::optional<double> exchange_dispatch_floor_us(const CallTraffic& traffic,
                                                 const MachineRates& rates);
/// Results across the link, then the weighted sum, which waits for them.
std::optional<double> exchange_combine_floor_us(const CallTraffic& traffic,
                                                const MachineRates& rates);
/// Of the weighted sum alone.
std::optional<double> combine_floor_us(const CallTraffic& traffic, const MachineRates& rates);

}  // namespace distmoe::tools
