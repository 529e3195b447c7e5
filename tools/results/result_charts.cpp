// SPDX-License-Identifier: Apache-2.0
#include "results/result_charts.hpp"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "number_text.hpp"
#include "results/line_chart.hpp"
#include "results/page_parts.hpp"
#include "svg_writer.hpp"

namespace distmoe::tools {
namespace {

std::string call_and_ranks(const ResultRow& row) { return row.call() + ranks_suffix(row); }

std::string call_and_tokens(const ResultRow& row) {
  return concat(row.call(), row.engine == "threads" ? "" : ", " + row.engine, ", ",
                tokens_text(row));
}

std::string place_of(const ResultRow& row) { return concat(row.shape, " on ", row.backend); }

std::string legend_of(const std::vector<std::string>& names) {
  std::string html = "<ul class=\"legend\">";
  for (std::size_t i = 0; i < names.size(); ++i) {
    html +=
        concat("<li><i class=\"c", series_colour(i), "\"></i>", escaped_markup(names[i]), "</li>");
  }
  return html + "</ul>\n";
}

/// FLOPs a byte of weights.
double intensity_of(const ResultRow& row) { return row.flops / row.weight_bytes; }

/// TFLOP/s; 0 where the call has none.
double rate_of(const ResultRow& row) { return row.tflops.value_or(0.0); }

bool has_roof(const ResultRow& row) {
  return rate_of(row) > 0.0 && row.dense_tflops && row.memory_tb_s() && row.weight_bytes > 0.0;
}

/// The largest of what `rate` says of the rows of `group`: rows of several runs share a roof.
template <typename Rate>
double largest_rate(const ResultGroup& group, const Rate& rate) {
  double largest = 0.0;
  for (const ResultRow* row : group) largest = std::max(largest, rate(*row).value_or(0.0));
  return largest;
}

/// min(dense, memory * intensity), with its corner, over the intensities of `group`.
ChartSeries roof_of(const ResultGroup& group) {
  const double dense = largest_rate(group, [](const ResultRow& row) { return row.dense_tflops; });
  const double memory = largest_rate(group, [](const ResultRow& row) { return row.memory_tb_s(); });
  const auto by_intensity = [](const ResultRow* row) { return intensity_of(*row); };
  const double corner = dense / memory;
  const double low =
      std::min(intensity_of(**std::ranges::min_element(group, {}, by_intensity)), corner) / 1.6;
  const double high =
      std::max(intensity_of(**std::ranges::max_element(group, {}, by_intensity)), corner) * 1.6;
  return {.colour = "var(--muted)",
          .points = {{low, low * memory},
                     {corner, dense},
                     {high, dense, concat(number_text(dense, dense < 10 ? 2 : 0), " TFLOP/s")}},
          .is_dashed = true,
          .has_marks = false};
}

/// Of a row in the series `name`.
using MakePoint = ChartPoint (*)(const std::string& name, const ResultRow& row);

/// A card of `chart` with a series more for each of the names that `name_of` gives rows.
std::string chart_card(const std::string& title, Chart chart, const ResultGroup& group,
                       std::string (*name_of)(const ResultRow&), MakePoint make_point,
                       bool is_joined) {
  std::vector<std::string> names;
  for (const auto& [name, rows] : grouped_by(thinned(group, kMostRowsOfAChart), name_of)) {
    ChartSeries series{.colour = concat("var(--c", series_colour(names.size()), ")"),
                       .is_joined = is_joined};
    for (const ResultRow* row : rows) {
      ChartPoint point = make_point(name, *row);
      point.is_hollow = row->is_unstable;
      point.tooltip += unstable_suffix(*row);
      // NOTE: std::stable_sort does not compile with clang and the C++ library of GCC 12.
      const auto place = is_joined
                             ? std::ranges::upper_bound(series.points, point.x, {}, &ChartPoint::x)
                             : series.points.end();
      series.points.insert(place, std::move(point));
    }
    chart.series.push_back(std::move(series));
    names.push_back(name);
  }
  return card(title, figure(svg_of(chart), "") + legend_of(names));
}

ChartPoint roofline_point(const std::string& call, const ResultRow& row) {
  return {intensity_of(row), rate_of(row), concat("T=", row.tokens),
          concat(call, ", ", size_text(row), ": ", number_text(rate_of(row), 3), " TFLOP/s")};
}

ChartPoint tokens_point(const std::string& call, const ResultRow& row) {
  return {static_cast<double>(row.tokens), rate_of(row), "",
          concat(call, ", ", size_text(row), ": ", time_text(row.median_us), ", ",
                 number_text(rate_of(row), 3), " TFLOP/s")};
}

ChartPoint ranks_point(const std::string& call, const ResultRow& row) {
  const double tokens_per_second =
      1e6 * static_cast<double>(row.tokens * row.ranks) / row.median_us;
  return {
      static_cast<double>(row.ranks), tokens_per_second, "",
      concat(call, ", ", row.ranks, " rank(s): ", number_text(tokens_per_second, 0), " tokens/s")};
}

template <typename Value>
bool has_two(const ResultGroup& group, Value ResultRow::* value) {
  std::set<Value> values;
  for (const ResultRow* row : group) values.insert(row->*value);
  return values.size() > 1;
}

}  // namespace

std::string roofline_section(const ResultGroup& rows, std::size_t most_bytes) {
  LimitedText cards(most_bytes);
  for (auto& [title, group] : grouped_by(rows, place_of)) {
    std::erase_if(group, [](const ResultRow* row) { return !has_roof(*row); });
    if (group.empty()) continue;
    cards.add(chart_card(title,
                         {.description = "roofline of " + title,
                          .x_title = "FLOPs a byte of weights",
                          .y_title = "TFLOP/s of a rank",
                          .series = {roof_of(group)}},
                         group, call_and_ranks, roofline_point, false));
  }
  return section("Roofline",
                 "Dashed: the least of the rate of a large dense product and what memory allows at "
                 "the fastest of reading, writing and copying, the largest of the runs shown. "
                 "Points below it have something left. A ring: unstable.",
                 "grid", cards);
}

std::string tokens_section(const ResultGroup& rows, std::size_t most_bytes) {
  LimitedText cards(most_bytes);
  for (auto& [title, group] : grouped_by(rows, place_of)) {
    std::erase_if(group, [](const ResultRow* row) { return rate_of(*row) <= 0.0; });
    if (!has_two(group, &ResultRow::tokens)) continue;
    cards.add(chart_card(title,
                         {.description = "rate over tokens of " + title,
                          .x_title = "tokens of each rank (T)",
                          .y_title = "TFLOP/s of a rank",
                          .series = {}},
                         group, call_and_ranks, tokens_point, true));
  }
  return section("Scaling over tokens",
                 "More tokens use what is read of the weights more often. A ring: unstable.",
                 "grid", cards);
}

std::string ranks_section(const ResultGroup& rows, std::size_t most_bytes) {
  LimitedText cards(most_bytes);
  for (const auto& [title, group] : grouped_by(rows, place_of)) {
    if (!has_two(group, &ResultRow::ranks)) continue;
    cards.add(chart_card(title,
                         {.description = "tokens per second over ranks of " + title,
                          .x_title = "ranks (P)",
                          .y_title = "tokens a second, all ranks",
                          .series = {}},
                         group, call_and_tokens, ranks_point, true));
  }
  return section("Scaling over ranks",
                 "Each rank brings as many tokens. Ranks of one machine or device share it: then "
                 "a flat line is all that can be had. A ring: unstable.",
                 "grid", cards);
}

}  // namespace distmoe::tools
