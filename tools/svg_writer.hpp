// SPDX-License-Identifier: Apache-2.0
//
// The few shapes that a drawing needs, written as SVG text. Coordinates are pixels.
#pragma once

#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace distmoe::tools {

struct Point {
  double x = 0.0;
  double y = 0.0;
};

struct TextStyle {
  double size = 13.0;
  const char* anchor = "start";  ///< start, middle or end
  const char* fill = "#1b1f24";
  bool bold = false;
};

struct LineStyle {
  const char* stroke = "#8c959f";
  double width = 1.0;
  bool dashed = false;
};

/// `words` as XML and HTML take them, control characters replaced.
std::string escaped_markup(std::string_view words);

class SvgWriter {
 public:
  /// `description` is what screen readers read. `background` is what is drawn on: a colour, or
  /// "none" on a page that has its own.
  SvgWriter(double width, double height, std::string_view description,
            const char* background = "#ffffff");

  void rectangle(Point corner, double width, double height, const char* fill,
                 std::string_view tooltip = {});
  void line(Point from, Point to, const LineStyle& style = {});
  void polygon(const std::vector<Point>& points, const char* fill, std::string_view tooltip = {});
  void circle(Point centre, double radius, const char* fill, std::string_view tooltip = {});
  /// Without a filling, but the pointer finds its inside too.
  void ring(Point centre, double radius, const char* stroke, std::string_view tooltip = {});
  void text(Point baseline, std::string_view words, const TextStyle& style = {});

  /// The whole document. Nothing can be drawn after it.
  std::string finish();

 private:
  void fill_and_tooltip(const char* element, const char* fill, std::string_view tooltip);

  std::ostringstream out_;
};

}  // namespace distmoe::tools
