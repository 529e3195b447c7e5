// SPDX-License-Identifier: Apache-2.0
#include "trace/trace_events.hpp"

#include <cstddef>
#include <nlohmann/json.hpp>

#include "core/check.hpp"

namespace distmoe::tools {
namespace {

using Json = nlohmann::ordered_json;

/// The process of all ranks in the viewer.
constexpr int kProcess = 1;

Json name_event(const char* what, int thread, const std::string& name) {
  return {
      {"name", what}, {"ph", "M"}, {"pid", kProcess}, {"tid", thread}, {"args", {{"name", name}}}};
}

Json step_event(const char* name, const RankTrace& rank, double begin, double end) {
  return {{"name", name},       {"cat", "distmoe"},
          {"ph", "X"},          {"pid", kProcess},
          {"tid", rank.rank},   {"ts", rank.begin_us + begin},
          {"dur", end - begin}, {"args", {{"rank", rank.rank}, {"rows", rank.rows}}}};
}

}  // namespace

std::string json_of(const TraceFile& trace) {
  Json events = Json::array();
  events.push_back(name_event("process_name", 0, trace.title));
  for (const RankTrace& rank : trace.ranks) {
    events.push_back(name_event("thread_name", rank.rank, concat("rank ", rank.rank)));
    for (std::size_t step = 0; step < trace.step_names.size(); ++step) {
      events.push_back(
          step_event(trace.step_names[step], rank, rank.step_us[step], rank.step_us[step + 1]));
    }
  }
  Json other = Json::object();
  for (const std::string& remark : trace.remarks) {
    const std::size_t equals = remark.find('=');
    other[remark.substr(0, equals)] = remark.substr(equals + 1);
  }
  const Json file = {{"traceEvents", events}, {"displayTimeUnit", "ns"}, {"otherData", other}};
  // NOTE: the path of a captured routing need not be UTF-8.
  return file.dump(1, ' ', false, Json::error_handler_t::replace) + '\n';
}

}  // namespace distmoe::tools
