// SPDX-License-Identifier: Apache-2.0
#include "bench/traffic.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "layout/packed_row.hpp"
#include "plan/expert_partition.hpp"

namespace distmoe::tools {
namespace {

constexpr double kBF16Bytes = 2.0;
constexpr double kF32Bytes = 4.0;
constexpr double kMicroseconds = 1e6;

/// Of an element of a weight, with its share of the scales: one for 32 elements of a row, in
/// training for a tile of 32 x 32.
double weight_element_bytes(Precision precision, bool trains) {
  switch (precision) {
    case Precision::kBF16: break;
    case Precision::kMXFP8: return 1.0 + (trains ? 1.0 / 1024.0 : 1.0 / 32.0);
    case Precision::kNVFP4: return 0.5 + 1.0 / 16.0;
    case Precision::kMXFP4: return 0.5 + 1.0 / 32.0;
  }
  return kBF16Bytes;
}

double expert_elements(const BenchShape& shape) {
  return 3.0 * static_cast<double>(shape.hidden_dim) * static_cast<double>(shape.intermediate_dim);
}

/// Bytes that cross a rank's link.
struct LinkBytes {
  double in = 0.0;
  double out = 0.0;

  double busier() const { return std::max(in, out); }
};

/// Rows and bytes of one rank.
struct RankTraffic {
  std::int64_t rows = 0;
  std::int64_t active_experts = 0;
  LinkBytes dispatched;
  LinkBytes returned;

  double link_bytes() const {
    return LinkBytes{dispatched.in + returned.in, dispatched.out + returned.out}.busier();
  }
};

/// Dispatch sends a token once to every rank that it needs; combine returns a row for each of its
/// routes there, or one sum.
class LinkCount {
 public:
  LinkCount(const BenchShape& shape, Combine combine, Precision precision,
            std::vector<RankTraffic>& ranks)
      : width_(static_cast<double>(shape.hidden_dim)),
        sent_bytes_(is_block_scaled(precision)
                        ? static_cast<double>(PackedRowLayout(precision, shape.hidden_dim).bytes)
                        : width_ * kBF16Bytes),
        combine_(combine),
        ranks_(ranks) {}

  void add_token(std::size_t owner, std::size_t peer, std::int64_t num_routes) {
    if (owner == peer || num_routes == 0) return;
    move(&RankTraffic::dispatched, owner, peer, sent_bytes_);
    move(&RankTraffic::returned, peer, owner,
         combine_ == Combine::kPerRank ? width_ * kF32Bytes
                                       : width_ * kBF16Bytes * static_cast<double>(num_routes));
  }

 private:
  void move(LinkBytes RankTraffic::*direction, std::size_t from, std::size_t to, double bytes) {
    (ranks_[from].*direction).out += bytes;
    (ranks_[to].*direction).in += bytes;
  }

  double width_;
  double sent_bytes_;  ///< of a row of x
  Combine combine_;
  std::vector<RankTraffic>& ranks_;
};

std::optional<double> time_at(double work, const std::optional<double>& rate) {
  if (work == 0.0) return 0.0;
  if (!rate || *rate <= 0.0) return std::nullopt;
  return work / *rate * kMicroseconds;
}

}  // namespace

CallTraffic count_traffic(const BenchShape& shape, std::span<const RoutedTokens> ranks,
                          Combine combine, Precision precision) {
  const auto size = static_cast<std::int64_t>(ranks.size());
  const std::int64_t num_experts = shape.experts_of(static_cast<int>(size));
  std::vector<RankTraffic> traffic(ranks.size());
  std::vector<std::int64_t> rows_per_expert(static_cast<std::size_t>(num_experts));
  std::vector<std::int64_t> routes_to(ranks.size());
  LinkCount link(shape, combine, precision, traffic);
  std::int64_t num_routes = 0;  // of the rank that brings most
  std::int64_t num_combined_rows = 0;
  std::int64_t num_combined_tokens = 0;
  for (std::size_t owner = 0; owner < ranks.size(); ++owner) {
    const std::vector<std::int32_t>& ids = ranks[owner].ids;
    // A disabled route is no work.
    const std::int64_t own_routes = std::ranges::count_if(ids, [](auto id) { return id >= 0; });
    num_routes = std::max(num_routes, own_routes);
    const std::int64_t own_tokens = std::ssize(ids) / shape.top_k;
    if (own_routes + own_tokens > num_combined_rows) {
      num_combined_rows = own_routes + own_tokens;
      num_combined_tokens = own_tokens;
    }
    for (auto row = ids.begin(); row != ids.end(); row += shape.top_k) {
      std::ranges::fill(routes_to, 0);
      for (auto id = row; id != row + shape.top_k; ++id) {
        if (*id < 0) continue;
        ++rows_per_expert[static_cast<std::size_t>(*id)];
        ++routes_to[static_cast<std::size_t>(expert_owner(num_experts, size, *id))];
      }
      for (std::size_t peer = 0; peer < ranks.size(); ++peer) {
        traffic[peer].rows += routes_to[peer];
        link.add_token(owner, peer, routes_to[peer]);
      }
    }
  }
  for (std::int64_t expert = 0; expert < num_experts; ++expert) {
    if (rows_per_expert[static_cast<std::size_t>(expert)] == 0) continue;
    ++traffic[static_cast<std::size_t>(expert_owner(num_experts, size, expert))].active_experts;
  }

  const double expert_bytes = expert_elements(shape) * weight_element_bytes(precision, false);
  const double token_bytes = static_cast<double>(shape.hidden_dim) * kBF16Bytes;
  CallTraffic call;
  call.flops = 2.0 * static_cast<double>(num_routes) * expert_elements(shape);
  call.combine_bytes = static_cast<double>(num_combined_rows) * token_bytes;
  call.output_bytes = static_cast<double>(num_combined_tokens) * token_bytes;
  for (const RankTraffic& rank : traffic) {
    call.weight_bytes =
        std::max(call.weight_bytes, static_cast<double>(rank.active_experts) * expert_bytes);
    call.link_bytes = std::max(call.link_bytes, rank.link_bytes());
    call.dispatch_bytes = std::max(call.dispatch_bytes, rank.dispatched.busier());
    call.return_bytes = std::max(call.return_bytes, rank.returned.busier());
    call.rows = std::max(call.rows, rank.rows);
  }
  return call;
}

CallTraffic count_training_traffic(const BenchShape& shape, std::span<const RoutedTokens> ranks,
                                   Combine combine, Precision precision) {
  // Rows of a training call cross links in BF16 whatever its precision.
  CallTraffic both = count_traffic(shape, ranks, combine);
  // A backward sends dy as a forward sends x, and gets a row back for every route.
  const CallTraffic backward =
      combine == Combine::kPerRoute ? both : count_traffic(shape, ranks, Combine::kPerRoute);
  both.flops *= 3;
  both.gradient_bytes = both.weight_bytes;
  both.weight_bytes *= (2.0 * weight_element_bytes(precision, true) + kBF16Bytes) / kBF16Bytes;
  both.link_bytes += backward.link_bytes;
  both.combine_bytes += backward.combine_bytes;
  both.output_bytes += backward.output_bytes;
  return both;
}

std::optional<double> memory_floor_us(double read, double written, const MachineRates& rates) {
  const std::optional<double> reading = time_at(read, rates.read_bytes);
  const std::optional<double> writing = time_at(written, rates.written_bytes);
  // NOTE: a machine may read and write at once, so that the two times do not add up.
  const double fastest = std::max({rates.copied_bytes.value_or(0.0), rates.read_bytes.value_or(0.0),
                                   rates.written_bytes.value_or(0.0)});
  const std::optional<double> moving = time_at(read + written, fastest);
  if (!reading || !writing || !moving) return std::nullopt;
  return std::max({*reading, *writing, *moving});
}

std::optional<double> products_floor_us(const CallTraffic& traffic, const MachineRates& rates) {
  const std::optional<double> compute = time_at(traffic.flops, rates.flops);
  const std::optional<double> weights =
      memory_floor_us(traffic.weight_bytes - traffic.gradient_bytes, traffic.gradient_bytes, rates);
  const std::optional<double> link = time_at(traffic.link_bytes, rates.link_bytes);
  // NOTE: ranks of one device or machine have no link between them whose rate could be measured.
  if (!compute || !weights) return std::nullopt;
  return std::max({*compute, *weights, link.value_or(0.0)});
}

std::optional<double> exchange_dispatch_floor_us(const CallTraffic& traffic,
                                                 const MachineRates& rates) {
  return traffic.dispatch_bytes == 0.0 ? std::nullopt
                                       : time_at(traffic.dispatch_bytes, rates.link_bytes);
}

std::optional<double> exchange_combine_floor_us(const CallTraffic& traffic,
                                                const MachineRates& rates) {
  const std::optional<double> sum = combine_floor_us(traffic, rates);
  const std::optional<double> link = time_at(traffic.return_bytes, rates.link_bytes);
  return sum && link ? std::optional(*link + *sum) : std::nullopt;
}

std::optional<double> combine_floor_us(const CallTraffic& traffic, const MachineRates& rates) {
  return memory_floor_us(traffic.combine_bytes - traffic.output_bytes, traffic.output_bytes, rates);
}

}  // namespace distmoe::tools
