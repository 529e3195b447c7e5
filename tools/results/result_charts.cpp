// SPDX-License-Identifier: Apache-2.0
#include "results/result_charts.hpp"

#include <algorithm>
#include <array>
#include <set>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "results/line_chart.hpp"
#include "results/page_parts.hpp"
#include "svg_writer.hpp"

namespace distmoe::tools {
namespace {

constexpr std::array kColours = {"var(--c0)", "var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)",
                                 "var(--c5)", "var(--c6)", "var(--c8)", "var(--c9)", "var(--c7)"};
constexpr std::array kColourClasses = {0, 1, 2, 3, 4, 5, 6, 8, 9, 7};

std::string call_and_ranks(const ResultRow& row) {
  return concat(row.call(), row.ranks > 1 ? concat(", ", row.ranks, " ranks") : std::string());
}

std::string call_and_tokens(const ResultRow& row) {
  return concat(row.call(), ", T = ", row.tokens);
}

std::string place_of(const ResultRow& row) { return concat(row.shape, " on ", row.backend); }

std::string legend_of(const std::vector<std::string>& names) {
  std::string html = "<ul class=\"legend\">";
  for (std::size_t i = 0; i < names.size(); ++i) {
    html += concat("<li><i class=\"c", kColourClasses[i % kColourClasses.size()], "\"></i>",
                   escaped_markup(names[i]), "</li>");
  }
  return html + "</ul>\n";
}

std::string section(const char* title, const char* words, const std::string& cards) {
  if (cards.empty()) return {};
  return concat("<h2>", title, "</h2>\n<p class=\"muted\">", words, "</p>\n<div class=\"grid\">\n",
                cards, "</div>\n");
}

/// FLOPs a byte of weights.
double intensity_of(const ResultRow& row) { return row.flops / row.weight_bytes; }

/// TFLOP/s; 0 where the call has none.
double rate_of(const ResultRow& row) { return row.tflops.value_or(0.0); }

bool has_roof(const ResultRow& row) {
  return rate_of(row) > 0.0 && row.dense_tflops && row.copy_tb_s && row.weight_bytes > 0.0;
}

/// min(dense, memory * intensity), with its corner, over the intensities of `group`.
ChartSeries roof_of(const ResultGroup& group) {
  const double dense = group.front()->dense_tflops.value_or(0.0);
  const double memory = group.front()->copy_tb_s.value_or(0.0);
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

std::string roofline_card(const std::string& title, const ResultGroup& group) {
  Chart chart{.description = "roofline of " + title,
              .x_title = "FLOPs a byte of weights",
              .y_title = "TFLOP/s of a rank",
              .series = {roof_of(group)}};
  std::vector<std::string> names;
  for (const auto& [call, rows] : grouped_by(group, call_and_ranks)) {
    ChartSeries series{.colour = kColours[names.size() % kColours.size()], .is_joined = false};
    for (const ResultRow* row : rows) {
      series.points.push_back(
          {intensity_of(*row), rate_of(*row), concat("T=", row->tokens),
           concat(call, ", ", size_text(*row), ": ", number_text(rate_of(*row), 3), " TFLOP/s")});
    }
    chart.series.push_back(std::move(series));
    names.push_back(call);
  }
  return card(title, figure(svg_of(chart), "") + legend_of(names));
}

std::string tokens_card(const std::string& title, const ResultGroup& group) {
  Chart chart{.description = "rate over tokens of " + title,
              .x_title = "tokens of each rank (T)",
              .y_title = "TFLOP/s of a rank",
              .series = {}};
  std::vector<std::string> names;
  for (auto& [call, rows] : grouped_by(group, call_and_ranks)) {
    std::ranges::sort(rows, {}, &ResultRow::tokens);
    ChartSeries series{.colour = kColours[names.size() % kColours.size()]};
    for (const ResultRow* row : rows) {
      series.points.push_back({static_cast<double>(row->tokens), rate_of(*row), "",
                               concat(call, ", ", size_text(*row), ": ", time_text(row->median_us),
                                      ", ", number_text(rate_of(*row), 3), " TFLOP/s")});
    }
    chart.series.push_back(std::move(series));
    names.push_back(call);
  }
  return card(title, figure(svg_of(chart), "") + legend_of(names));
}

/// Of all ranks.
double tokens_per_second(const ResultRow& row) {
  return 1e6 * static_cast<double>(row.tokens * row.ranks) / row.median_us;
}

std::string ranks_card(const std::string& title, const ResultGroup& group) {
  Chart chart{.description = "tokens per second over ranks of " + title,
              .x_title = "ranks (P)",
              .y_title = "tokens a second, all ranks",
              .series = {}};
  std::vector<std::string> names;
  for (auto& [call, rows] : grouped_by(group, call_and_tokens)) {
    std::ranges::sort(rows, {}, &ResultRow::ranks);
    ChartSeries series{.colour = kColours[names.size() % kColours.size()]};
    for (const ResultRow* row : rows) {
      series.points.push_back({static_cast<double>(row->ranks), tokens_per_second(*row), "",
                               concat(call, ", ", row->ranks, " rank(s): ",
                                      number_text(tokens_per_second(*row), 0), " tokens/s")});
    }
    chart.series.push_back(std::move(series));
    names.push_back(call);
  }
  return card(title, figure(svg_of(chart), "") + legend_of(names));
}

template <typename Value>
bool has_two(const ResultGroup& group, Value ResultRow::*value) {
  std::set<Value> values;
  for (const ResultRow* row : group) values.insert(row->*value);
  return values.size() > 1;
}

}  // namespace

std::string roofline_section(const ResultGroup& rows) {
  std::string cards;
  for (auto& [title, group] : grouped_by(rows, place_of)) {
    std::erase_if(group, [](const ResultRow* row) { return !has_roof(*row); });
    if (!group.empty()) cards += roofline_card(title, group);
  }
  return section("Roofline",
                 "Dashed: the least of the rate of a large dense product and what memory allows at "
                 "the rate of a copy, both of the same run. Points below it have something left; "
                 "a point may lie a little above where reading is faster than copying.",
                 cards);
}

std::string tokens_section(const ResultGroup& rows) {
  std::string cards;
  for (auto& [title, group] : grouped_by(rows, place_of)) {
    std::erase_if(group, [](const ResultRow* row) { return rate_of(*row) <= 0.0; });
    if (has_two(group, &ResultRow::tokens)) cards += tokens_card(title, group);
  }
  return section("Scaling over tokens", "More tokens use what is read of the weights more often.",
                 cards);
}

std::string ranks_section(const ResultGroup& rows) {
  std::string cards;
  for (const auto& [title, group] : grouped_by(rows, place_of)) {
    if (has_two(group, &ResultRow::ranks)) cards += ranks_card(title, group);
  }
  return section("Scaling over ranks",
                 "Each rank brings as many tokens. Ranks of one machine or device share it: then "
                 "a flat line is all that can be had.",
                 cards);
}

}  // namespace distmoe::tools
