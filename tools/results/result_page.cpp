// SPDX-License-Identifier: Apache-2.0
#include "results/result_page.hpp"

#include <algorithm>
#include <iterator>
#include <set>
#include <vector>

#include "core/check.hpp"
#include "number_text.hpp"
#include "plan/byte_text.hpp"
#include "results/page_parts.hpp"
#include "results/projection.hpp"
#include "results/result_charts.hpp"
#include "results/result_groups.hpp"
#include "svg_writer.hpp"

namespace distmoe::tools {
namespace {

/// Every distinct text of the rows, in their order.
template <typename Text>
std::vector<std::string> distinct(std::span<const ResultRow> rows, const Text& text) {
  std::vector<std::string> all;
  for (const ResultRow& row : rows) {
    const std::string words = text(row);
    if (!words.empty()) add_once(all, words);
  }
  return all;
}

std::string joined(const std::vector<std::string>& words, const char* between) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

std::string tile(const std::string& value, const std::string& meaning) {
  return concat("<div class=\"card tile\"><b>", escaped_markup(value), "</b><span>",
                escaped_markup(meaning), "</span></div>\n");
}

std::string heading(std::span<const ResultRow> rows) {
  const auto machines = distinct(rows, [](const ResultRow& row) { return row.machine; });
  const auto dates = distinct(rows, [](const ResultRow& row) { return row.date.substr(0, 10); });
  const auto versions =
      distinct(rows, [](const ResultRow& row) { return "distmoe " + row.version; });
  const auto torch = distinct(rows, [](const ResultRow& row) { return row.torch; });
  std::vector<std::string> facts = versions;
  facts.insert(facts.end(), torch.begin(), torch.end());
  facts.insert(facts.end(), dates.begin(), dates.end());
  return concat("<h1>distmoe benchmark report</h1>\n<p class=\"muted\">",
                escaped_markup(joined(machines, "; ")), "<br>", escaped_markup(joined(facts, ", ")),
                "</p>\n");
}

/// The row with the largest value among those that are stable; null where none has one.
template <typename Value>
const ResultRow* best_of(std::span<const ResultRow> rows, const Value& value_of) {
  const ResultRow* best = nullptr;
  for (const ResultRow& row : rows) {
    if (row.is_unstable || value_of(row) <= 0.0) continue;
    if (best == nullptr || value_of(row) > value_of(*best)) best = &row;
  }
  return best;
}

std::string tiles(std::span<const ResultRow> rows) {
  std::string html = "<div class=\"tiles\">\n";
  const auto place = [](const ResultRow& row) {
    return concat(row.shape, ", ", row.call(), ", ", size_text(row));
  };
  const auto efficiency = [](const ResultRow& row) { return row.efficiency.value_or(0.0); };
  if (const ResultRow* best = best_of(rows, efficiency)) {
    html += tile(percent_text(efficiency(*best)), "of the floor at best: " + place(*best));
  }
  const auto rate = [](const ResultRow& row) { return row.tflops.value_or(0.0); };
  if (const ResultRow* best = best_of(rows, rate)) {
    html += tile(number_text(rate(*best), rate(*best) < 10 ? 3 : 0) + " TFLOP/s",
                 "a rank at most: " + place(*best));
  }
  // Beside the best of the peers, which are no choice of ours.
  const auto lead = [](const ResultRow& row) {
    double least = 0.0;
    for (const PeerResult& peer : row.peers) {
      if (!peer.is_unstable && (least == 0.0 || peer.ratio < least)) least = peer.ratio;
    }
    return least;
  };
  if (const ResultRow* best = best_of(rows, lead)) {
    html += tile(number_text(lead(*best), 2) + " x",
                 "faster than the fastest peer at best: " + place(*best));
  }
  const auto num_unstable = std::ranges::count(rows, true, &ResultRow::is_unstable);
  html += tile(concat(num_unstable, " of ", rows.size()), "rows unstable: a spread over 10 %");
  return html + "</div>\n";
}

std::string table(std::span<const ResultRow> rows) {
  std::string html =
      "<h2>Every row</h2>\n<div class=\"card scroll\"><table>\n<tr><th>shape</th><th "
      "class=\"t\">call</th><th>T</th><th>P</th><th>time</th><th>spread</th><th>TFLOP/s</th>"
      "<th>of floor</th><th>x bound</th><th>rel. L2</th></tr>\n";
  for (const ResultRow& row : rows) {
    html +=
        concat("<tr><td>", escaped_markup(row.shape), "</td><td class=\"t\">",
               escaped_markup(row.call()), "</td><td>", row.tokens, "</td><td>", row.ranks,
               "</td><td>", time_text(row.median_us), "</td><td>", percent_text(row.spread),
               row.is_unstable ? kUnstableBadge : "", "</td><td>", number_or_dash(row.tflops, 3),
               "</td><td>", row.efficiency ? percent_text(*row.efficiency) : "-", "</td><td>",
               number_or_dash(row.bound_ratio, 2), "</td><td>", number_text(row.rel_l2, 4),
               row.is_repeatable ? "" : " <span class=\"badge\">other bits</span>", "</td></tr>\n");
  }
  return html +
         "</table></div>\n<p class=\"note\">Medians over interleaved rounds, of the slowest "
         "rank. Spread: from the tenth to the ninetieth percentile, in units of the median. "
         "x bound: times the dense products of the same FLOPs, round by round.</p>\n";
}

/// "OLMoE-1B-7B, forward, 2 ranks".
std::string call_title(const ResultRow& row) {
  return concat(row.shape, ", ", row.call(), ranks_suffix(row));
}

std::string efficiency_of(const ResultRow& row) {
  const double floor_us = row.floor_us.value_or(0.0);
  const auto bar = [&](const std::string& name, double us, int colour) {
    return Bar{.name = name,
               .fraction = floor_us / us,
               .value = time_text(us),
               .ratio = {},
               .colour = colour};
  };
  std::vector<Bar> bars = {bar("distmoe", row.median_us, 0)};
  bars.front().is_unstable = row.is_unstable;
  // Of few tokens it reads the weights of one expert alone, and says nothing of the floor.
  if (row.bound_us && *row.bound_us >= floor_us) {
    bars.push_back(bar("dense GEMM", *row.bound_us, 7));
    if (row.bound_ratio) bars.back().ratio = number_text(1.0 / *row.bound_ratio, 2) + " x";
  }
  for (std::size_t i = 0; i < row.peers.size(); ++i) {
    const PeerResult& peer = row.peers[i];
    bars.push_back(bar(peer.name, peer.median_us, static_cast<int>(i) + 1));
    bars.back().ratio = number_text(peer.ratio, 2) + " x";
    bars.back().is_unstable = peer.is_unstable;
  }
  return concat("<div class=\"size\">", tokens_text(row), " <span>floor ", time_text(floor_us),
                ", distmoe at ", percent_text(floor_us / row.median_us), "</span></div>\n",
                bars_of(bars));
}

std::string efficiency_section(const ResultGroup& rows) {
  std::string cards;
  for (const auto& [title, group] : grouped_by(rows, call_title)) {
    std::string body;
    for (const ResultRow* row : group) {
      if (row->floor_us && *row->floor_us > 0.0) body += efficiency_of(*row);
    }
    if (!body.empty()) cards += card(title, body);
  }
  return section("Efficiency",
                 "The floor is the time that the machine needs at its own rates: products, weights "
                 "or links, whichever takes longest. A full bar is the floor; x: times as long as "
                 "distmoe in the same rounds. Dense GEMM: products of the same FLOPs alone, "
                 "without routing; left out where it passes the floor, because on a CPU it reads "
                 "the weights of one expert.",
                 "wide", cards);
}

/// Of every call a card with the wholes of its rows that have any part.
std::string stack_cards(const ResultGroup& rows, Stack (*stack_of)(const ResultRow&),
                        std::string (*text_of)(double)) {
  std::string cards;
  for (const auto& [title, group] : grouped_by(rows, call_title)) {
    std::vector<Stack> stacks;
    for (const ResultRow* row : group) {
      Stack stack = stack_of(*row);
      if (!stack.parts.empty()) stacks.push_back(std::move(stack));
    }
    if (!stacks.empty()) cards += card(title, stacks_of(stacks, text_of));
  }
  return cards;
}

Stack steps_of(const ResultRow& row) { return {tokens_text(row), row.steps}; }

std::string steps_section(const ResultGroup& rows) {
  return section("Where the time goes",
                 "Medians of the steps of a call, marked in calls of their own; names as in "
                 "traces.",
                 "wide", stack_cards(rows, steps_of, time_text));
}

std::string projection_section(const ResultGroup& rows) {
  const std::vector<Projection> projections = projections_of(rows);
  if (projections.empty()) return {};
  std::string html = concat(
      "<h2>", kProjectedRanks, " GPUs <span class=\"badge\">projection, not a measurement</span>",
      "</h2>\n<p class=\"muted\">From the times on one GPU and on two: the share of the link's "
      "time that two did not hide is taken to stay what it was, of the traffic that ",
      kProjectedRanks,
      " have. It knows nothing of imbalance between ranks, nor of switches that give less to many "
      "than to two.</p>\n<div class=\"card scroll\"><table>\n<tr><th>shape</th><th>T</th>"
      "<th>1 GPU</th><th>2 GPUs</th><th>link of 2</th><th>of it seen</th><th>link of ",
      kProjectedRanks, "</th><th>projected</th><th>of own 1 GPU</th></tr>\n");
  for (const Projection& projection : projections) {
    html += concat("<tr><td>", escaped_markup(projection.one->shape), "</td><td>",
                   projection.one->tokens, "</td><td>", time_text(projection.one->median_us),
                   "</td><td>", time_text(projection.two->median_us), "</td><td>",
                   time_text(projection.link_of_two_us), "</td><td>", percent_text(projection.seen),
                   "</td><td>", time_text(projection.link_us), "</td><td>",
                   time_text(projection.us), "</td><td>",
                   percent_text(projection.one->median_us / projection.us), "</td></tr>\n");
  }
  return html + "</table></div>\n";
}

std::string bytes_text(double bytes) { return human_bytes(static_cast<std::int64_t>(bytes)); }

/// Without what is nothing.
Stack memory_of(const ResultRow& row) {
  Stack stack{tokens_text(row), {}};
  std::ranges::copy_if(row.plan_bytes, std::back_inserter(stack.parts),
                       [](const NamedValue& part) { return part.value > 0.0; });
  return stack;
}

std::string memory_section(const ResultGroup& rows) {
  return section("Memory plan",
                 "What a context of a rank allocates, to the byte, beside its weights.", "wide",
                 stack_cards(rows, memory_of, bytes_text));
}

std::string how_section(std::span<const ResultRow> rows) {
  std::string html = "<h2>How it was measured</h2>\n<div class=\"card\">\n";
  for (const std::string& machine :
       distinct(rows, [](const ResultRow& row) { return row.machine; })) {
    const auto row = std::ranges::find(rows, machine, &ResultRow::machine);
    html += concat("<p>", escaped_markup(machine), ": dense products ", rates_text(*row), ", link ",
                   number_or_dash(row->link_gb_s, 1),
                   " GB/s each way, in the first of its runs; a measurement of nothing takes ",
                   number_text(row->overhead_us, 2), " us.</p>\n");
  }
  html += "<pre>";
  for (const std::string& command :
       distinct(rows, [](const ResultRow& row) { return row.command; })) {
    html += escaped_markup(command) + "\n";
  }
  html += "</pre>\n";
  std::set<std::string> missing;
  for (const ResultRow& row : rows) missing.insert(row.missing.begin(), row.missing.end());
  for (const std::string& words : missing) {
    html += concat("<p class=\"note\">Not measured: ", escaped_markup(words), "</p>\n");
  }
  return html + "</div>\n";
}

}  // namespace

std::string page_of(std::span<const ResultRow> rows) {
  ResultGroup all;
  for (const ResultRow& row : rows) all.push_back(&row);
  return concat(page_head("distmoe: benchmark report"), heading(rows), tiles(rows),
                efficiency_section(all), roofline_section(all), steps_section(all),
                tokens_section(all), ranks_section(all), projection_section(all),
                memory_section(all), table(rows), how_section(rows), "</main>\n</body>\n</html>\n");
}

}  // namespace distmoe::tools
