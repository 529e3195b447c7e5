// SPDX-License-Identifier: Apache-2.0
#include "results/line_chart.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "svg_writer.hpp"

namespace distmoe::tools {
namespace {

constexpr double kWidth = 360.0;
constexpr double kHeight = 270.0;
constexpr double kLeft = 52.0;
constexpr double kRight = 346.0;
constexpr double kTop = 26.0;
constexpr double kBottom = 226.0;
constexpr double kTextSize = 12.5;
constexpr double kLetterWidth = 7.8;
constexpr const char* kInk = "var(--ink)";
constexpr const char* kMuted = "var(--muted)";
constexpr const char* kGrid = "var(--grid)";
constexpr std::size_t kFewTicks = 3;

/// A logarithmic axis with a margin at both ends.
class Axis {
 public:
  Axis(double pixel_low, double pixel_high) : pixel_low_(pixel_low), pixel_high_(pixel_high) {}

  void include(double value) {
    low_ = std::min(low_, value);
    high_ = std::max(high_, value);
  }
  void finish() {
    constexpr double kMargin = 1.35;
    low_ /= kMargin;
    high_ *= kMargin;
  }
  double pixel(double value) const {
    const double part = std::log(value / low_) / std::log(high_ / low_);
    return pixel_low_ + part * (pixel_high_ - pixel_low_);
  }
  std::vector<double> ticks() const { return log_ticks(low_, high_); }

 private:
  double pixel_low_;
  double pixel_high_;
  double low_ = std::numeric_limits<double>::max();
  double high_ = std::numeric_limits<double>::min();
};

class ChartDrawing {
 public:
  explicit ChartDrawing(const Chart& chart)
      : chart_(chart), svg_(kWidth, kHeight, chart.description, "none") {
    for (const ChartSeries& series : chart.series) {
      for (const ChartPoint& point : series.points) {
        x_.include(point.x);
        y_.include(point.y);
      }
    }
    x_.finish();
    y_.finish();
  }

  std::string draw() {
    draw_axes();
    // Labels keep clear of all marks, also of those that are drawn later.
    for (const ChartSeries& series : chart_.series) {
      for (const ChartPoint& point : series.points) {
        const Point at = place(point);
        if (series.has_marks) taken_.push_back({at.x - 5, at.y - 5, at.x + 5, at.y + 5});
      }
    }
    for (const ChartSeries& series : chart_.series) draw_series(series);
    return svg_.finish();
  }

 private:
  void draw_axes() {
    for (const double tick : x_.ticks()) {
      const double x = x_.pixel(tick);
      svg_.line({x, kTop}, {x, kBottom}, {.stroke = kGrid});
      svg_.text({x, kBottom + 17}, tick_text(tick),
                {.size = kTextSize, .anchor = "middle", .fill = kMuted});
    }
    for (const double tick : y_.ticks()) {
      const double y = y_.pixel(tick);
      svg_.line({kLeft, y}, {kRight, y}, {.stroke = kGrid});
      svg_.text({kLeft - 6, y + 4}, tick_text(tick),
                {.size = kTextSize, .anchor = "end", .fill = kMuted});
    }
    svg_.text({(kLeft + kRight) / 2, kHeight - 8}, chart_.x_title,
              {.size = kTextSize, .anchor = "middle", .fill = kMuted});
    svg_.text({6, 14}, chart_.y_title, {.size = kTextSize, .anchor = "start", .fill = kMuted});
  }

  Point place(const ChartPoint& point) const { return {x_.pixel(point.x), y_.pixel(point.y)}; }

  void draw_series(const ChartSeries& series) {
    for (std::size_t i = 1; series.is_joined && i < series.points.size(); ++i) {
      svg_.line(place(series.points[i - 1]), place(series.points[i]),
                {.stroke = series.colour.c_str(), .width = 2.0, .dashed = series.is_dashed});
    }
    for (const ChartPoint& point : series.points) {
      const Point at = place(point);
      if (series.has_marks && point.is_hollow) {
        svg_.ring(at, 4.0, series.colour.c_str(), point.tooltip);
      } else if (series.has_marks) {
        svg_.circle(at, 4.5, series.colour.c_str(), point.tooltip);
      }
      if (!point.label.empty()) draw_label(at, point.label, series.has_marks);
    }
  }

  /// Above or below its point, or nowhere where others are already: its tooltip says it too.
  void draw_label(Point at, const std::string& words, bool has_mark) {
    const bool is_right = at.x > (kLeft + kRight) / 2;
    const double width = kLetterWidth * static_cast<double>(words.size());
    const double x = at.x + (has_mark ? (is_right ? -8.0 : 8.0) : 0.0);
    const double left = is_right ? x - width : x;
    for (const double dy : {has_mark ? 15.0 : -6.0, -8.0}) {
      const Box box{left, at.y + dy - kTextSize, left + width, at.y + dy + 3};
      const bool is_free = std::ranges::none_of(taken_, [&](const Box& other) {
        return box.left < other.right && other.left < box.right && box.top < other.bottom &&
               other.top < box.bottom;
      });
      if (!is_free || box.bottom > kBottom) continue;
      taken_.push_back(box);
      svg_.text({x, at.y + dy}, words,
                {.size = kTextSize, .anchor = is_right ? "end" : "start", .fill = kInk});
      return;
    }
  }

  struct Box {
    double left, top, right, bottom;
  };

  const Chart& chart_;
  SvgWriter svg_;
  std::vector<Box> taken_;
  Axis x_{kLeft, kRight};
  Axis y_{kBottom, kTop};
};

}  // namespace

std::vector<double> log_ticks(double low, double high) {
  std::vector<double> decades;
  std::vector<double> fine;
  for (int power = static_cast<int>(std::floor(std::log10(low)));
       power <= static_cast<int>(std::ceil(std::log10(high))); ++power) {
    for (const double factor : {1.0, 2.0, 5.0}) {
      const double tick = factor * std::pow(10.0, power);
      if (tick < low || tick > high) continue;
      fine.push_back(tick);
      if (factor == 1.0) decades.push_back(tick);
    }
  }
  return decades.size() >= kFewTicks ? decades : fine;
}

std::string tick_text(double value) {
  std::ostringstream text;
  text.precision(4);
  if (value >= 1e6) {
    text << value / 1e6 << "M";
  } else if (value >= 1e4) {
    text << value / 1e3 << "k";
  } else {
    text << value;
  }
  return text.str();
}

std::string svg_of(const Chart& chart) { return ChartDrawing(chart).draw(); }

}  // namespace distmoe::tools
