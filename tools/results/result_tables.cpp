// SPDX-License-Identifier: Apache-2.0
#include "results/result_tables.hpp"

#include <algorithm>
#include <vector>

#include "core/check.hpp"
#include "number_text.hpp"
#include "results/page_parts.hpp"
#include "results/projection.hpp"
#include "results/result_choice.hpp"

namespace distmoe::tools {
namespace {

/// A run, by its first row.
std::string run_text(const ResultRow& row) {
  return concat("- `", row.command, "`, ", row.date.substr(0, 10), ", distmoe ", row.version,
                row.torch.empty() ? "" : ", " + row.torch, ". ", row.machine,
                ". Beside its first row: dense products ", rates_text(row),
                row.link_gb_s ? ", link " + number_text(*row.link_gb_s, 0) + " GB/s" : "",
                "; a measurement of nothing ", number_text(row.overhead_us, 2), " us.\n");
}

/// Names of all peers, in their order.
std::vector<std::string> peers_of(const ResultGroup& rows) {
  std::vector<std::string> names;
  for (const ResultRow* row : rows) {
    for (const PeerResult& peer : row->peers) add_once(names, peer.name);
  }
  return names;
}

std::string cell_of(const ResultRow& row, const std::string& peer) {
  const auto found = std::ranges::find(row.peers, peer, &PeerResult::name);
  if (found == row.peers.end()) return "-";
  return number_text(found->ratio, 2) + " x" + (found->is_unstable ? " (unstable)" : "");
}

/// "2.05 x" of a training step, "-" of anything else.
std::string backward_text(const ResultRow& row) {
  if (!row.forward_us || !row.backward_us) return "-";
  return number_text(*row.backward_us / *row.forward_us, 2) + " x";
}

std::string projection_table(const ResultGroup& rows) {
  const std::vector<Projection> projections = projections_of(rows);
  if (projections.empty()) return {};
  std::string text = concat(
      "\nProjected, not measured, for ", kProjectedRanks, " GPUs:\n\n| shape | T | 1 GPU, us | 2 ",
      "GPUs, us | link of 2, us | of it seen | link of ", kProjectedRanks,
      ", us | projected, us | of own 1 GPU |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: | ",
      "---: | ---: |");
  for (const Projection& projection : projections) {
    text += concat(
        "\n| ", projection.one->shape, " | ", projection.one->tokens, " | ",
        number_text(projection.one->median_us, 0), " | ", number_text(projection.two->median_us, 0),
        " | ", number_text(projection.link_of_two_us, 0), " | ", number_text(projection.seen, 2),
        " | ", number_text(projection.link_us, 0), " | ", number_text(projection.us, 0), " | ",
        number_text(projection.one->median_us / projection.us, 2),
        projection.is_unstable() ? " (unstable)" : "", " |");
  }
  return text + "\n";
}

std::string time_cell(const ResultRow& row) {
  return time_text(row.median_us) + (row.is_wrong() ? " (WRONG)" : "");
}

std::string result_table(const ResultGroup& rows) {
  const std::vector<std::string> peers = peers_of(rows);
  const bool trains =
      std::ranges::any_of(rows, [](const ResultRow* row) { return row->backward_us.has_value(); });
  std::string text =
      "\n| shape | call | T | P | time | spread | TFLOP/s | of the floor | x bound |";
  if (trains) text += " backward / forward |";
  for (const std::string& peer : peers) text += concat(" ", peer, " |");
  text += "\n| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |";
  if (trains) text += " ---: |";
  for (std::size_t i = 0; i < peers.size(); ++i) text += " ---: |";
  for (const ResultRow* row : rows) {
    text += concat("\n| ", row->shape, " | ", row->call(), " | ", row->tokens, " | ", row->ranks,
                   row->engine == "threads" ? "" : " " + row->engine, " | ", time_cell(*row), " | ",
                   percent_text(row->spread), row->is_unstable ? " (unstable)" : "", " | ",
                   number_or_dash(row->tflops, 3), " | ",
                   row->efficiency ? percent_text(*row->efficiency) : "-", " | ",
                   number_or_dash(row->bound_ratio, 2), " |");
    if (trains) text += concat(" ", backward_text(*row), " |");
    for (const std::string& peer : peers) text += concat(" ", cell_of(*row, peer), " |");
  }
  return text + "\n";
}

/// The runs that `rows` are of, each by its first row.
std::string runs_of(const ResultGroup& rows) {
  std::string text;
  for (auto row = rows.begin(); row != rows.end(); ++row) {
    const auto is_same_run = [&](const ResultRow* other) {
      return other->command == (*row)->command && other->date == (*row)->date;
    };
    if (std::find_if(rows.begin(), row, is_same_run) == row) text += run_text(**row);
  }
  return text;
}

}  // namespace

std::string markdown_of(std::span<const ResultRow> rows) {
  const ResultChoice choice = choose_results(rows);
  std::string text;
  for (const auto& [machine, shown] : grouped_by(choice.shown, machine_of)) {
    text += concat(text.empty() ? "" : "\n", runs_of(shown), result_table(shown),
                   projection_table(right_of(shown)));
  }
  for (const std::string& words : choice.again) text += concat("\nMeasured again: ", words, ".\n");
  return text;
}

}  // namespace distmoe::tools
