// SPDX-License-Identifier: Apache-2.0
//
// A chart with logarithmic axes, as wide as a phone, whose text keeps its size where the page shows
// it at about that width.
#pragma once

#include <string>
#include <vector>

namespace distmoe::tools {

struct ChartPoint {
  double x = 0.0;
  double y = 0.0;
  std::string label{};    ///< beside the point; may be empty
  std::string tooltip{};  ///< what a pointer over it shows
  bool is_hollow = false;
};

struct ChartSeries {
  std::string colour = "var(--c0)";
  std::vector<ChartPoint> points{};  ///< ascending in x where they are joined
  bool is_joined = true;
  bool is_dashed = false;
  bool has_marks = true;
};

struct Chart {
  std::string description;  ///< for screen readers
  std::string x_title;
  std::string y_title;
  std::vector<ChartSeries> series;
};

/// One svg element. Every value is more than 0.
std::string svg_of(const Chart& chart);

/// Values at which an axis from `low` to `high` has lines: powers of 10, and twice and five times
/// those where few of them are in.
std::vector<double> log_ticks(double low, double high);

/// "0.05", "2", "1500": as people write it.
std::string tick_text(double value);

}  // namespace distmoe::tools
