// SPDX-License-Identifier: Apache-2.0
#include "bench/bench_report.hpp"

#include <algorithm>
#include <array>
#include <ctime>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/check.hpp"
#include "distmoe/version.hpp"
#include "number_text.hpp"
#include "plan/option_names.hpp"
#include "report.hpp"

namespace distmoe::tools {
namespace {

using Json = nlohmann::ordered_json;

Json number_or_null(const std::optional<double>& value) {
  return value ? Json(*value) : Json(nullptr);
}

Json json_of(const MemoryPlan& plan) {
  return {{"slots", plan.total_activation_bytes},    {"device_scratch", plan.device_scratch_bytes},
          {"host_scratch", plan.host_scratch_bytes}, {"communication", plan.communication_bytes},
          {"metadata", plan.metadata_bytes},         {"control", plan.control_bytes},
          {"workspace", plan.workspace_bytes},       {"allocated", plan.allocated_bytes}};
}

Json json_of(const std::vector<StepTime>& steps) {
  Json list = Json::array();
  for (const StepTime& step : steps) list.push_back({{"name", step.name}, {"us", step.us}});
  return list;
}

Json json_of(const std::vector<PeerTime>& peers) {
  Json list = Json::array();
  for (const PeerTime& peer : peers) {
    list.push_back({{"name", peer.name},
                    {"median_us", peer.us.median},
                    {"p10_us", peer.us.p10},
                    {"p90_us", peer.us.p90},
                    {"unstable", peer.is_unstable()},
                    {"ratio", peer.ratio}});
  }
  return list;
}

/// What was run, alike in all rows but for the shape and the tokens.
Json json_of_call(const BenchReport& report, const BenchRow& row) {
  return {
      {"shape", row.shape.name},
      {"hidden_dim", row.shape.hidden_dim},
      {"intermediate_dim", row.shape.intermediate_dim},
      {"top_k", row.shape.top_k},
      {"experts", row.experts},
      {"tokens", row.tokens},
      {"ranks", report.ranks},
      {"engine", report.engine},
      {"backend", report.backend},
      {"precision", report.precision},
      {"mode", report.mode},
      {"graph", report.graph},
      {"routing", report.routing},
      {"combine", report.combine},
      {"activation_policy",
       report.activation_policy ? Json(*report.activation_policy) : Json(nullptr)},
      {"recompute", report.recompute ? Json(*report.recompute) : Json(nullptr)},
      {"rounds", report.rounds},
  };
}

Json object_of(const BenchReport& report, const BenchRow& row) {
  Json object = json_of_call(report, row);
  object.update({
      {"median_us", row.us.median},
      {"p10_us", row.us.p10},
      {"p90_us", row.us.p90},
      {"spread", row.us.relative()},
      {"unstable", row.is_unstable()},
      {"tflops", number_or_null(row.tflops)},
      {"floor_us", number_or_null(row.floor_us)},
      {"efficiency", number_or_null(row.efficiency())},
      {"bound_us", number_or_null(row.bound_us)},
      {"bound_ratio", number_or_null(row.bound_ratio)},
      {"forward_us", number_or_null(row.forward_us)},
      {"backward_us", number_or_null(row.backward_us)},
      {"restore_us", number_or_null(row.restore_us)},
      {"steps", json_of(row.steps)},
      {"peers", json_of(row.peers)},
      {"flops", row.traffic.flops},
      {"weight_bytes", row.traffic.weight_bytes},
      {"gradient_bytes", row.traffic.gradient_bytes},
      {"link_bytes", row.traffic.link_bytes},
      {"plan_bytes", json_of(row.plan)},
      {"dense_tflops", number_or_null(row.ceilings.dense_tflops)},
      {"copy_tb_s", number_or_null(row.ceilings.copy_tb_s)},
      {"read_tb_s", number_or_null(row.ceilings.read_tb_s)},
      {"write_tb_s", number_or_null(row.ceilings.write_tb_s)},
      {"link_gb_s", number_or_null(row.ceilings.link_gb_s)},
      {"overhead_us", row.overhead_us},
      {"rel_l2", row.rel_l2},
      {"tolerance", report.tolerance},
      {"repeat_bitwise_equal", row.is_bitwise_repeatable},
      {"machine", report.machine},
      {"torch", report.torch.empty() ? Json(nullptr) : Json(report.torch)},
      {"version", report.version},
      {"date", report.date},
      {"command", report.command},
      {"missing", report.missing},
  });
  return object;
}

struct Column {
  const char* head;
  int width;
};

constexpr int kShapeWidth = 24;
constexpr Column kColumns[] = {{"tokens", 8},      {"median us", 12}, {"p10", 11},
                               {"p90", 11},        {"spread", 8},     {"TFLOP/s", 10},
                               {"bound us", 12},   {"x bound", 9},    {"floor us", 12},
                               {"efficiency", 11}, {"rel L2", 10}};

void add_line(std::ostringstream& text, const std::string& shape,
              const std::vector<std::string>& cells, const std::string& remark) {
  text << std::left << std::setw(kShapeWidth) << shape << std::right;
  for (std::size_t i = 0; i < cells.size(); ++i) text << std::setw(kColumns[i].width) << cells[i];
  text << remark << '\n';
}

/// Under a row: what others took, and where its own time went.
void add_details(std::ostringstream& text, const BenchRow& row) {
  for (const PeerTime& peer : row.peers) {
    text << "    " << std::left << std::setw(kShapeWidth - 4) << peer.name << std::right
         << std::setw(kColumns[0].width) << "" << std::setw(kColumns[1].width)
         << number_text(peer.us.median, 1) << std::setw(kColumns[2].width)
         << number_text(peer.us.p10, 1) << std::setw(kColumns[3].width)
         << number_text(peer.us.p90, 1) << std::setw(kColumns[4].width)
         << percent_text(peer.us.relative()) << "   " << number_text(peer.ratio, 2) << " x as long"
         << (peer.is_unstable() ? "  unstable" : "") << '\n';
  }
  for (const StepTime& step : row.steps) {
    text << "    " << std::left << std::setw(kShapeWidth - 4) << step.name << std::right
         << std::setw(kColumns[0].width) << "" << std::setw(kColumns[1].width)
         << number_text(step.us, 1) << '\n';
  }
}

/// Of the rounds of all rows: "0.424", or "0.424 to 0.441"; "-" where none has it.
std::string range_text(const BenchReport& report, std::optional<double> BenchCeilings::*rate,
                       int digits) {
  std::optional<double> least;
  std::optional<double> most;
  for (const BenchRow& row : report.rows) {
    const std::optional<double>& value = row.ceilings.*rate;
    if (!value) continue;
    least = std::min(least.value_or(*value), *value);
    most = std::max(most.value_or(*value), *value);
  }
  const std::string low = number_or_dash(least, digits);
  const std::string high = number_or_dash(most, digits);
  return low == high ? low : concat(low, " to ", high);
}

double largest_overhead_us(const BenchReport& report) {
  double largest = 0.0;
  for (const BenchRow& row : report.rows) largest = std::max(largest, row.overhead_us);
  return largest;
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
    remark += "  forward " + number_text(*row.forward_us, 1) + ", backward " +
              number_text(*row.backward_us, 1) + " us (" +
              number_text(*row.backward_us / *row.forward_us, 2) + " x)";
    if (report.recompute == true && row.restore_us) {
      remark += ", of which computing again " + number_text(*row.restore_us, 1) + " us (" +
                number_text(*row.restore_us / *row.forward_us, 2) + " x)";
    }
  }
  return row.is_unstable() ? remark + "  unstable" : remark;
}

}  // namespace

std::optional<double> BenchRow::efficiency() const {
  if (!floor_us || us.median <= 0.0) return std::nullopt;
  return *floor_us / us.median;
}

BenchReport report_of(const BenchOptions& options, int num_ranks) {
  BenchReport report;
  report.ranks = num_ranks;
  report.engine = to_string(options.engine);
  report.backend = to_string(options.backend);
  report.mode = to_string(options.mode);
  report.routing = options.routing_text();
  report.precision = option_name(options.precision);
  report.combine = option_name(options.combine);
  report.graph = options.graph;
  report.rounds = options.rounds;
  report.tolerance = options.used_tolerance();
  if (options.mode == BenchMode::kTrain) {
    report.activation_policy = option_name(options.activation_policy);
    report.recompute = options.recompute;
  }
  report.version = version();
  report.command = options.command_text();
  std::array<char, 32> date{};
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  report.date.assign(date.data(),
                     std::strftime(date.data(), date.size(), "%Y-%m-%dT%H:%M:%SZ", &utc));
  return report;
}

std::string json_of(const BenchReport& report, const BenchRow& row) {
  // NOTE: the path of a captured routing need not be UTF-8.
  return object_of(report, row).dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
}

std::string text_of(const BenchReport& report) {
  std::ostringstream text;
  text << report.mode << ", " << report.ranks << " rank(s) (" << report.engine << ", "
       << report.backend << ", " << report.precision << ", " << report.combine
       << (report.activation_policy ? ", " + *report.activation_policy : std::string())
       << (report.recompute.value_or(false) ? ", recompute" : "") << "), "
       << (report.graph ? "CUDA graph, " : "") << "routing " << report.routing << ", "
       << report.rounds << " rounds\n"
       << report.machine << '\n'
       << "ceilings: dense " << range_text(report, &BenchCeilings::dense_tflops, 2)
       << " TFLOP/s, copy " << range_text(report, &BenchCeilings::copy_tb_s, 3) << " TB/s, read "
       << range_text(report, &BenchCeilings::read_tb_s, 3) << " TB/s, write "
       << range_text(report, &BenchCeilings::write_tb_s, 3) << " TB/s, link "
       << range_text(report, &BenchCeilings::link_gb_s, 1) << " GB/s each way\n"
       << "a measurement of nothing takes " << number_text(largest_overhead_us(report), 2) << " us"
       << (report.torch.empty() ? "" : "; peers: " + report.torch) << '\n';
  for (const std::string& missing : report.missing) text << "not measured: " << missing << '\n';
  text << '\n';
  std::vector<std::string> heads;
  for (const Column& column : kColumns) heads.emplace_back(column.head);
  add_line(text, "shape", heads, "");
  for (const BenchRow& row : report.rows) {
    const auto efficiency = row.efficiency();
    add_line(
        text, row.shape.name,
        {std::to_string(row.tokens), number_text(row.us.median, 1), number_text(row.us.p10, 1),
         number_text(row.us.p90, 1), percent_text(row.us.relative()), number_or_dash(row.tflops, 2),
         number_or_dash(row.bound_us, 1), number_or_dash(row.bound_ratio, 3),
         number_or_dash(row.floor_us, 1), number_or_dash(efficiency, 3), distance_text(row.rel_l2)},
        remark_on(report, row));
    add_details(text, row);
  }
  return text.str();
}

Failure judge(const BenchReport& report) {
  for (const BenchRow& row : report.rows) {
    const auto place = [&] {
      return concat("shape ", row.shape.name, ", ", row.tokens, " tokens: ");
    };
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
