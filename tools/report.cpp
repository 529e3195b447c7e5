// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <algorithm>
#include <cstddef>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>

#include "number_text.hpp"
#include "runtime/imbalance.hpp"

namespace distmoe::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kLabelWidth = 16;

Json number_or_null(const std::optional<double>& value) {
  return value ? Json(*value) : Json(nullptr);
}

/// Null without a reference.
void add_distances(Json& object, const std::string& suffix,
                   const std::optional<Comparison>& comparison) {
  const auto add = [&](const char* key, double Comparison::*value) {
    object[key + suffix] = comparison ? Json((*comparison).*value) : Json(nullptr);
  };
  add("rel_l2", &Comparison::rel_l2);
  add("cosine", &Comparison::cosine);
  add("max_abs", &Comparison::max_abs);
  const auto add_count = [&](const char* key, std::int64_t Comparison::*value) {
    if (comparison && (*comparison).*value > 0) object[key + suffix] = (*comparison).*value;
  };
  add_count("left_out", &Comparison::num_left_out);
  add_count("one_sided", &Comparison::num_one_sided);
}

template <typename Value>
std::string list_of(const std::vector<Value>& values) {
  std::ostringstream text;
  for (std::size_t index = 0; index < values.size(); ++index) {
    text << (index == 0 ? "" : " ") << values[index];
  }
  return text.str();
}

std::string mebibytes(std::int64_t bytes) {
  return number_text(static_cast<double>(bytes) / (1 << 20), 2) + " MiB";
}

class Lines {
 public:
  template <typename... Values>
  void add(const char* label, const Values&... values) {
    text_ << std::left << std::setw(kLabelWidth) << label;
    (text_ << ... << values) << '\n';
  }
  std::string str() const { return text_.str(); }

 private:
  std::ostringstream text_;
};

/// Whether there were two calls, or two backwards, to be compared.
bool repeats_anything(const RunReport& report) {
  return report.call_seconds.size() > 1 || (report.training && report.training->num_forwards > 1);
}

void add_buffers(Lines& lines, const char* label, const std::vector<PlanBuffer>& buffers) {
  for (const PlanBuffer& buffer : buffers) lines.add(label, buffer.bytes, " B ", buffer.name);
}

void add_not_finite(Lines& lines, const Comparison& comparison) {
  const std::string text = not_finite_text(comparison);
  if (!text.empty()) lines.add("NaN or infinite", text);
}

/// "layer 1 of slot 0, saved: busiest rank 1.04 x, expert 1.40 x the mean; ..."
void add_load(Lines& lines, const CallStatistics& load) {
  std::string place = "forward";
  if (load.slot >= 0) {
    place = "layer " + std::to_string(load.slot_layer) + " of slot " + std::to_string(load.slot) +
            (load.is_recomputed ? ", to compute again" : ", saved");
  }
  lines.add("load", place, ": busiest rank ", std::setprecision(3), load.rank_imbalance,
            " x, expert ", load.expert_imbalance, " x the mean; ", load.dropped_routes,
            " dropped; scratch ", load.device_scratch_bytes, " B on the device, ",
            load.host_scratch_bytes, " B on the host");
}

}  // namespace

double median_of(std::vector<double> values) {
  if (values.empty()) return 0.0;
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

bool is_within_tolerance(const RunReport& report) {
  const auto is_within = [&](const std::optional<Comparison>& comparison) {
    return !comparison || comparison->rel_l2 <= report.tolerance;
  };
  return is_within(report.comparison) && is_within(report.comparison2);
}

std::string distance_text(double distance) {
  if (distance == kInfinitelyFar) return "infinite";
  std::ostringstream text;
  text << std::setprecision(3) << distance;
  return text.str();
}

std::string not_finite_text(const Comparison& comparison) {
  std::ostringstream text;
  if (comparison.num_one_sided > 0) {
    text << comparison.num_one_sided << " elements of y or the reference alone";
  }
  if (comparison.num_left_out > 0) {
    text << (comparison.num_one_sided > 0 ? "; " : "") << comparison.num_left_out
         << " of both, left out";
  }
  return text.str();
}

std::string json_of(const RunReport& report) {
  Json object = {
      {"checkpoint", report.checkpoint}, {"architecture", report.architecture},
      {"layer", report.layer},           {"ranks", report.ranks},
      {"engine", report.engine},         {"backend", report.backend},
      {"combine", report.combine},       {"precision", report.precision},
  };
  if (!report.pipeline.empty()) object["pipeline"] = report.pipeline;
  if (report.has_stored_codes) object["stored_codes"] = *report.has_stored_codes;
  object.update({
      {"tokens", report.tokens},
      {"rows_per_rank", report.rows_per_rank},
      {"experts_per_rank", report.experts_per_rank},
      {"imbalance", number_or_null(imbalance_of(report.rows_per_expert))},
  });
  add_distances(object, "", report.comparison);
  object.update({
      {"seconds", median_of(report.call_seconds)},
      {"planned_bytes", report.planned_bytes},
      {"peak_bytes", report.peak_bytes},
      {"repeat_bitwise_equal", report.repeat_bitwise_equal},
  });
  if (report.has_input2) add_distances(object, "_input2", report.comparison2);
  if (report.training) {
    const RegionPeaks& peaks = report.training->peaks;
    object["forwards"] = report.training->num_forwards;
    object["recomputed_layers"] = report.training->num_recomputed;
    object["slot_peak_bytes"] = peaks.slot_bytes;
    object["device_scratch_peak_bytes"] = peaks.device_scratch_bytes;
    object["host_scratch_peak_bytes"] = peaks.host_scratch_bytes;
    if (report.training->clip_counts) {
      const auto& counts = *report.training->clip_counts;
      object["clip_counts"] = {{"gate", counts[0]}, {"up", counts[1]}, {"elements", counts[2]}};
    }
  }
  // NOTE: a path need not be UTF-8; what is not is replaced, since JSON cannot hold it.
  return object.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
}

std::string text_of(const RunReport& report) {
  Lines lines;
  lines.add("checkpoint", report.checkpoint, " (", report.architecture, "), layer ", report.layer);
  lines.add("ranks", report.ranks, " (", report.engine, ", ", report.backend, ", ",
            report.precision, report.pipeline.empty() ? "" : " ", report.pipeline,
            report.combine == "per_rank" ? ", per_rank" : "", ")");
  lines.add("tokens", report.tokens);
  lines.add("rows per rank", list_of(report.rows_per_rank));
  lines.add("experts", list_of(report.experts_per_rank), " per rank");
  if (report.has_stored_codes) {
    lines.add("weights", *report.has_stored_codes ? "codes of the checkpoint"
                                                  : "quantised from " + report.stored_format);
  }
  if (const auto imbalance = imbalance_of(report.rows_per_expert)) {
    lines.add("imbalance", std::setprecision(3), *imbalance, " x the mean rows of an expert");
  }
  if (report.comparison) {
    lines.add("relative L2", distance_text(report.comparison->rel_l2), " (tolerance ",
              report.tolerance, is_within_tolerance(report) ? ": within)" : ": OUTSIDE)");
    lines.add("cosine", std::setprecision(9), report.comparison->cosine);
    lines.add("max |y - ref|", distance_text(report.comparison->max_abs));
    add_not_finite(lines, *report.comparison);
  } else {
    lines.add("relative L2", report.is_reference_of_another_layer
                                 ? "not compared: y_ref is of the layer without --rmsnorm"
                                 : "no y_ref in the input: nothing to compare with");
  }
  if (report.comparison2) {
    lines.add("of --input2", distance_text(report.comparison2->rel_l2), " relative L2");
    add_not_finite(lines, *report.comparison2);
  }
  if (report.training) {
    const RegionPeaks& peaks = report.training->peaks;
    lines.add("training", report.training->num_forwards, " forwards and backwards a run, ",
              report.training->num_recomputed, " computed again");
    lines.add("slot peaks", list_of(peaks.slot_bytes), " B");
    lines.add("scratch peaks", peaks.device_scratch_bytes, " B on the device, ",
              peaks.host_scratch_bytes, " B on the host");
    if (report.training->clip_counts) {
      const auto& counts = *report.training->clip_counts;
      lines.add("above the limit", counts[0], " gate and ", counts[1], " up activations of ",
                counts[2]);
    }
  }
  lines.add("seconds", std::setprecision(4), median_of(report.call_seconds), " (median of ",
            report.call_seconds.size(), ")");
  lines.add("memory", mebibytes(report.planned_bytes), " planned, ", mebibytes(report.peak_bytes),
            " at the peak, per rank");
  if (repeats_anything(report)) {
    lines.add("repeats", report.repeat_bitwise_equal ? "bitwise equal" : "DIFFERENT BITS");
  }
  return lines.str();
}

std::string stats_text_of(const RunReport& report) {
  Lines lines;
  lines.add("tokens per rank", list_of(report.tokens_per_rank));
  lines.add("rows per expert", list_of(report.rows_per_expert));
  for (const CallStatistics& load : report.layers) add_load(lines, load);
  lines.add("call seconds", std::setprecision(4), list_of(report.call_seconds));
  lines.add("weights", report.weight_bytes, " B, largest rank");
  lines.add("scratch rows", report.plan.device_scratch_rows, " on the device, ",
            report.plan.total_scratch_rows, " in all");
  lines.add("scratch", report.plan.device_scratch_bytes, " B on the device, ",
            report.plan.host_scratch_bytes, " B on the host");
  add_buffers(lines, "communication", report.plan.communication_buffers);
  add_buffers(lines, "metadata", report.plan.metadata_buffers);
  add_buffers(lines, "control", report.plan.control_buffers);
  add_buffers(lines, "workspace", report.plan.workspace_buffers);
  lines.add("allocated", report.plan.allocated_bytes, " B");
  return lines.str();
}

}  // namespace distmoe::tools
