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
#include "results/result_choice.hpp"
#include "results/result_groups.hpp"
#include "svg_writer.hpp"

namespace distmoe::tools {
namespace {

/// Every distinct text of the rows, in their order.
template <typename Text>
std::vector<std::string> distinct(const ResultGroup& rows, const Text& text) {
  std::vector<std::string> all;
  for (const ResultRow* row : rows) {
    const std::string words = text(*row);
    if (!words.empty()) add_once(all, words);
  }
  return all;
}

/// The first ones, and how many there are besides.
std::string joined(const std::vector<std::string>& words, const char* between) {
  constexpr std::size_t kMost = 12;
  std::string text;
  for (std::size_t i = 0; i < std::min(words.size(), kMost); ++i) {
    text += (text.empty() ? "" : between) + words[i];
  }
  return words.size() > kMost ? concat(text, between, "and ", words.size() - kMost, " more") : text;
}

std::string tile(const std::string& value, const std::string& meaning) {
  return concat("<div class=\"card tile\"><b>", escaped_markup(value), "</b><span>",
                escaped_markup(meaning), "</span></div>\n");
}

std::string heading(const ResultGroup& rows) {
  const auto machines = distinct(rows, machine_of);
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
const ResultRow* best_of(const ResultGroup& rows, const Value& value_of) {
  const ResultRow* best = nullptr;
  for (const ResultRow* row : rows) {
    if (row->is_unstable || value_of(*row) <= 0.0) continue;
    if (best == nullptr || value_of(*row) > value_of(*best)) best = row;
  }
  return best;
}

/// What is left out and why, and which of several results is the one that is shown.
std::string notices(const ResultChoice& choice) {
  std::string html;
  const std::size_t num_wrong = choice.shown.size() - right_of(choice.shown).size();
  if (num_wrong > 0) {
    html += concat("<p>", kWrongBadge, " ", num_wrong, " of ", choice.shown.size(),
                   " rows: the timed call was outside the tolerance or gave other bits than an "
                   "untimed one. They are in the table of all rows alone.</p>\n");
  }
  if (!choice.again.empty()) {
    html += concat("<p class=\"muted\">", choice.again.size(),
                   " calls were measured more than once on a machine: the newest result counts."
                   "</p>\n<details><summary>which</summary>\n<p class=\"note\">",
                   escaped_markup(joined(choice.again, "; ")), ".</p></details>\n");
  }
  return html;
}

/// Of one machine.
std::string tiles(const ResultGroup& rows) {
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
  const auto num_unstable =
      std::ranges::count_if(rows, [](const ResultRow* row) { return row->is_unstable; });
  html += tile(concat(num_unstable, " of ", rows.size()), "rows unstable: a spread over 10 %");
  return html + "</div>\n";
}

std::string table_row(const ResultRow& row) {
  return concat("<tr><td>", escaped_markup(row.shape), "</td><td class=\"t\">",
                escaped_markup(row.call()), "</td><td>", row.tokens, "</td><td>", row.ranks,
                row.engine == "threads" ? "" : " " + escaped_markup(row.engine), "</td><td>",
                time_text(row.median_us), "</td><td>", percent_text(row.spread),
                row.is_unstable ? kUnstableBadge : "", "</td><td>", number_or_dash(row.tflops, 3),
                "</td><td>", row.efficiency ? percent_text(*row.efficiency) : "-", "</td><td>",
                number_or_dash(row.bound_ratio, 2), "</td><td>", number_or_dash(row.rel_l2, 4),
                row.is_wrong() ? kWrongBadge : "",
                row.is_repeatable ? "" : " <span class=\"badge\">other bits</span>",
                "</td></tr>\n");
}

std::string table(const ResultGroup& rows, std::size_t most_bytes) {
  LimitedText body(most_bytes);
  for (const ResultRow* row : rows) body.add(table_row(*row));
  return concat(
      "<h2>Every row</h2>\n<div class=\"card scroll\"><table>\n<tr><th>shape</th><th "
      "class=\"t\">call</th><th>T</th><th>P</th><th>time</th><th>spread</th><th>TFLOP/s</th>"
      "<th>of floor</th><th>x bound</th><th>rel. L2</th></tr>\n",
      body.text(), "</table></div>\n", body.left_out("rows"),
      "<p class=\"note\">Medians over interleaved rounds, of the slowest rank. Spread: from the "
      "tenth to the ninetieth percentile, in units of the median. x bound: times the dense "
      "products of the same FLOPs, round by round. Wrong: rel. L2 is above the tolerance of the "
      "run.</p>\n");
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
  // On a CPU it reads the weights of one expert alone: of few tokens it says nothing of the floor.
  if (row.bound_us && (row.backend != "cpu" || *row.bound_us >= floor_us)) {
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

/// Behind the title of a card that does not show all of its rows.
std::string part_text(std::size_t num_shown, std::size_t num_rows) {
  return num_shown == num_rows ? std::string() : concat(" (", num_shown, " of ", num_rows, ")");
}

std::string efficiency_section(const ResultGroup& rows, std::size_t most_bytes) {
  LimitedText cards(most_bytes);
  for (auto& [title, group] : grouped_by(rows, call_title)) {
    std::erase_if(group, [](const ResultRow* row) { return row->floor_us.value_or(0.0) <= 0.0; });
    if (group.empty()) continue;
    const ResultGroup some = thinned(group, kMostRowsOfACard);
    std::string body;
    for (const ResultRow* row : some) body += efficiency_of(*row);
    cards.add(card(title + part_text(some.size(), group.size()), body));
  }
  return section("Efficiency",
                 "The floor is the time that the machine needs at its own rates: products, weights "
                 "or links, whichever takes longest. A full bar is the floor; x: times as long as "
                 "distmoe in the same rounds. Dense GEMM: products of the same FLOPs alone, "
                 "without routing; on a CPU left out where it passes the floor, because there it "
                 "reads the weights of one expert.",
                 "wide", cards);
}

/// Of every call a card with the wholes of its rows that have any part.
LimitedText stack_cards(const ResultGroup& rows, std::size_t most_bytes,
                        Stack (*stack_of)(const ResultRow&), std::string (*text_of)(double)) {
  LimitedText cards(most_bytes);
  for (auto& [title, group] : grouped_by(rows, call_title)) {
    std::erase_if(group, [&](const ResultRow* row) { return stack_of(*row).parts.empty(); });
    if (group.empty()) continue;
    std::vector<Stack> stacks;
    for (const ResultRow* row : thinned(group, kMostRowsOfACard)) stacks.push_back(stack_of(*row));
    cards.add(card(title + part_text(stacks.size(), group.size()), stacks_of(stacks, text_of)));
  }
  return cards;
}

Stack steps_of(const ResultRow& row) {
  return {tokens_text(row) + unstable_suffix(row), row.steps};
}

std::string steps_section(const ResultGroup& rows, std::size_t most_bytes) {
  return section("Where the time goes",
                 "Medians of the steps of a call, marked in calls of their own; names as in "
                 "traces.",
                 "wide", stack_cards(rows, most_bytes, steps_of, time_text));
}

std::string projection_section(const ResultGroup& rows, std::size_t most_bytes) {
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
  LimitedText body(most_bytes);
  for (const Projection& projection : projections) {
    body.add(concat("<tr><td>", escaped_markup(projection.one->shape), "</td><td>",
                    projection.one->tokens, "</td><td>", time_text(projection.one->median_us),
                    "</td><td>", time_text(projection.two->median_us), "</td><td>",
                    time_text(projection.link_of_two_us), "</td><td>",
                    percent_text(projection.seen), "</td><td>", time_text(projection.link_us),
                    "</td><td>", time_text(projection.us), "</td><td>",
                    percent_text(projection.one->median_us / projection.us),
                    projection.is_unstable() ? kUnstableBadge : "", "</td></tr>\n"));
  }
  return concat(html, body.text(), "</table></div>\n", body.left_out("rows"));
}

std::string bytes_text(double bytes) { return human_bytes(static_cast<std::int64_t>(bytes)); }

/// Without what is nothing.
Stack memory_of(const ResultRow& row) {
  Stack stack{tokens_text(row), {}};
  std::ranges::copy_if(row.plan_bytes, std::back_inserter(stack.parts),
                       [](const NamedValue& part) { return part.value > 0.0; });
  return stack;
}

std::string memory_section(const ResultGroup& rows, std::size_t most_bytes) {
  return section("Memory plan",
                 "What a context of a rank allocates, to the byte, beside its weights.", "wide",
                 stack_cards(rows, most_bytes, memory_of, bytes_text));
}

std::string how_section(const ResultGroup& rows, std::size_t most_bytes) {
  const ResultRow& first = *rows.front();
  std::string html = concat(
      "<h2>How it was measured</h2>\n<div class=\"card\">\n<p>", escaped_markup(first.machine),
      ": dense products ", rates_text(first), ", link ", number_or_dash(first.link_gb_s, 1),
      " GB/s each way, beside the first of its rows; a measurement of nothing takes ",
      number_text(first.overhead_us, 2), " us.</p>\n<pre>");
  LimitedText commands(most_bytes / 2);
  for (const std::string& command :
       distinct(rows, [](const ResultRow& row) { return row.command; })) {
    commands.add(escaped_markup(command) + "\n");
  }
  html += concat(commands.text(), "</pre>\n", commands.left_out("commands"));
  std::set<std::string> reasons;
  for (const ResultRow* row : rows) reasons.insert(row->missing.begin(), row->missing.end());
  LimitedText missing(most_bytes / 2);
  for (const std::string& words : reasons) {
    missing.add(concat("<p class=\"note\">Not measured: ", escaped_markup(words), "</p>\n"));
  }
  return concat(html, missing.text(), missing.left_out("reasons"), "</div>\n");
}

/// All sections of one machine, each of a few shares of so many bytes.
std::string machine_part(const ResultGroup& shown, std::size_t share) {
  const ResultGroup right = right_of(shown);
  std::string html;
  if (!right.empty()) {
    html = concat(tiles(right), efficiency_section(right, 2 * share),
                  roofline_section(right, share), steps_section(right, share),
                  tokens_section(right, share), ranks_section(right, share),
                  projection_section(right, share), memory_section(right, share));
  }
  return concat(html, table(shown, 3 * share), how_section(shown, share));
}

}  // namespace

std::string page_of(std::span<const ResultRow> rows) {
  constexpr std::size_t kMostBytes = 1'700'000;
  constexpr std::size_t kMostMachines = 8;
  constexpr std::size_t kSharesOfAMachine = 12;
  const ResultChoice choice = choose_results(rows);
  const std::vector<NamedGroup> machines = grouped_by(choice.shown, machine_of);
  const std::size_t num_parts = std::min(machines.size(), kMostMachines);
  std::string html =
      concat(page_head("distmoe: benchmark report"), heading(choice.shown), notices(choice));
  for (std::size_t i = 0; i < num_parts; ++i) {
    const auto& [machine, shown] = machines[i];
    if (machines.size() > 1) {
      html += concat("<h2 class=\"machine\">", escaped_markup(machine), "</h2>\n");
    }
    html += machine_part(shown, kMostBytes / kSharesOfAMachine / num_parts);
  }
  if (machines.size() > num_parts) {
    html += concat("<p class=\"note\">", machines.size() - num_parts,
                   " more machines are left out, so that the page stays small: give fewer "
                   "results.</p>\n");
  }
  return html + "</main>\n</body>\n</html>\n";
}

}  // namespace distmoe::tools
