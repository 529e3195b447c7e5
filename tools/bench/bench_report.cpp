// SPDX-License-Identifier: Apache-2.0
#include "bench/bench_report.hpp"

#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/check.hpp"
#include "report.hpp"

namespace distmoe::tools {
namespace {

using Json = nlohmann::ordered_json;

Json number_or_null(const std::optional<double>& value) {
  return value ? Json(*value) : Json(nullptr);
}

Json json_of(const BenchReport& report, const BenchRow& row) {
  return {
      {"shape", row.shape},
      {"tokens", row.tokens},
      {"ranks", report.ranks},
      {"engine", report.engine},
      {"backend", report.backend},
      {"precision", "bf16"},
      {"mode", report.mode},
      {"graph", report.graph},
      {"routing", report.routing},
      {"combine", report.combine},
      {"activation_policy",
       report.activation_policy ? Json(*report.activation_policy) : Json(nullptr)},
      {"recompute", report.recompute ? Json(*report.recompute) : Json(nullptr)},
      {"rounds", report.rounds},
      {"median_us", row.us.median},
      {"p10_us", row.us.p10},
      {"p90_us", row.us.p90},
      {"unstable", row.is_unstable()},
      {"tflops", number_or_null(row.tflops)},
      {"floor_us", number_or_null(row.floor_us)},
      {"efficiency", number_or_null(row.efficiency())},
      {"bound_us", number_or_null(row.bound_us)},
      {"forward_us", number_or_null(row.forward_us)},
      {"backward_us", number_or_null(row.backward_us)},
      {"restore_us", number_or_null(row.restore_us)},
      {"dense_tflops", number_or_null(report.ceilings.dense_tflops)},
      {"copy_tb_s", number_or_null(report.ceilings.copy_tb_s)},
      {"read_tb_s", number_or_null(report.ceilings.read_tb_s)},
      {"link_gb_s", number_or_null(report.ceilings.link_gb_s)},
      {"rel_l2", row.rel_l2},
      {"repeat_bitwise_equal", row.is_bitwise_repeatable},
      {"machine", report.machine},
  };
}

std::string fixed(double value, int digits) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(digits) << value;
  return text.str();
}

std::string fixed_or_dash(const std::optional<double>& value, int digits) {
  return value ? fixed(*value, digits) : "-";
}

struct Column {
  const char* head;
  int width;
};

constexpr int kShapeWidth = 24;
constexpr Column kColumns[] = {{"tokens", 8},    {"median us", 12},  {"p10", 11},
                               {"p90", 11},      {"TFLOP/s", 10},    {"bound us", 12},
                               {"floor us", 12}, {"efficiency", 11}, {"rel L2", 10}};

void add_line(std::ostringstream& text, const std::string& shape,
              const std::vector<std::string>& cells, const std::string& remark) {
  text << std::left << std::setw(kShapeWidth) << shape << std::right;
  for (std::size_t i = 0; i < cells.size(); ++i) text << std::setw(kColumns[i].width) << cells[i];
  text << remark << '\n';
}

/// NaN is outside too.
bool is_within(const BenchReport& report, const BenchRow& row) {
  return row.rel_l2 <= report.tolerance;
}

std::string remark_on(const BenchReport& report, const BenchRow& row) {
  if (!is_within(report, row)) return "  WRONG: outside the tolerance";
  if (!row.is_bitwise_repeatable) return "  WRONG: repeats differ";
  std::string remark;
  if (row.forward_us && row.backward_us) {
    remark += "  forward " + fixed(*row.forward_us, 1) + ", backward " +
              fixed(*row.backward_us, 1) + " us (" + fixed(*row.backward_us / *row.forward_us, 2) +
              " x)";
    if (report.recompute == true && row.restore_us) {
      remark += ", of which computing again " + fixed(*row.restore_us, 1) + " us (" +
                fixed(*row.restore_us / *row.forward_us, 2) + " x)";
    }
  }
  return row.is_unstable() ? remark + "  unstable" : remark;
}

}  // namespace

std::optional<double> BenchRow::efficiency() const {
  if (!floor_us || us.median <= 0.0) return std::nullopt;
  return *floor_us / us.median;
}

std::string json_of(const BenchReport& report) {
  std::string text;
  for (const BenchRow& row : report.rows) {
    // NOTE: the path of a captured routing need not be UTF-8.
    text += json_of(report, row).dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
  }
  return text;
}

std::string text_of(const BenchReport& report) {
  std::ostringstream text;
  text << report.mode << ", " << report.ranks << " rank(s) (" << report.engine << ", "
       << report.backend << ", bf16, " << report.combine
       << (report.activation_policy ? ", " + *report.activation_policy : std::string())
       << (report.recompute.value_or(false) ? ", recompute" : "") << "), "
       << (report.graph ? "CUDA graph, " : "") << "routing " << report.routing << ", "
       << report.rounds << " rounds\n"
       << report.machine << '\n'
       << "ceilings: dense " << fixed_or_dash(report.ceilings.dense_tflops, 2) << " TFLOP/s, copy "
       << fixed_or_dash(report.ceilings.copy_tb_s, 3) << " TB/s, read "
       << fixed_or_dash(report.ceilings.read_tb_s, 3) << " TB/s, link "
       << fixed_or_dash(report.ceilings.link_gb_s, 1) << " GB/s each way\n";
  for (const std::string& missing : report.missing) text << "not measured: " << missing << '\n';
  text << '\n';
  std::vector<std::string> heads;
  for (const Column& column : kColumns) heads.emplace_back(column.head);
  add_line(text, "shape", heads, "");
  for (const BenchRow& row : report.rows) {
    const auto efficiency = row.efficiency();
    add_line(
        text, row.shape,
        {std::to_string(row.tokens), fixed(row.us.median, 1), fixed(row.us.p10, 1),
         fixed(row.us.p90, 1), fixed_or_dash(row.tflops, 2), fixed_or_dash(row.bound_us, 1),
         fixed_or_dash(row.floor_us, 1), fixed_or_dash(efficiency, 3), distance_text(row.rel_l2)},
        remark_on(report, row));
  }
  return text.str();
}

Failure judge(const BenchReport& report) {
  for (const BenchRow& row : report.rows) {
    const auto place = [&] { return concat("shape ", row.shape, ", ", row.tokens, " tokens: "); };
    if (!is_within(report, row)) {
      return {
          ExitCode::kRuntimeFailure, ErrorCode::kInternal,
          concat(place(), "the timed call is outside the tolerance: the relative L2 distance to ",
                 "a plain computation is ", distance_text(row.rel_l2), ", legal is at most ",
                 report.tolerance)};
    }
    if (!row.is_bitwise_repeatable) {
      return {ExitCode::kRuntimeFailure, ErrorCode::kInternal,
              concat(place(), "the timed call and an untimed one gave different bits")};
    }
  }
  return {};
}

}  // namespace distmoe::tools
