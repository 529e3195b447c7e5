// SPDX-License-Identifier: Apache-2.0
#include "svg_writer.hpp"

#include <iomanip>

namespace distmoe::tools {

std::string escaped_markup(std::string_view words) {
  std::string text;
  for (const char letter : words) {
    switch (letter) {
      case '&': text += "&amp;"; break;
      case '<': text += "&lt;"; break;
      case '>': text += "&gt;"; break;
      case '"': text += "&quot;"; break;
      default: text += static_cast<unsigned char>(letter) < 0x20 ? ' ' : letter;
    }
  }
  return text;
}

SvgWriter::SvgWriter(double width, double height, std::string_view description,
                     const char* background) {
  out_ << std::fixed << std::setprecision(2);
  out_ << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << width << "\" height=\"" << height
       << "\" viewBox=\"0 0 " << width << " " << height
       << "\" role=\"img\" font-family=\"Helvetica, Arial, sans-serif\">\n<title>"
       << escaped_markup(description) << "</title>\n";
  rectangle({0, 0}, width, height, background);
}

void SvgWriter::fill_and_tooltip(const char* element, const char* fill, std::string_view tooltip) {
  out_ << " fill=\"" << fill << "\"";
  if (tooltip.empty()) {
    out_ << "/>\n";
  } else {
    out_ << "><title>" << escaped_markup(tooltip) << "</title></" << element << ">\n";
  }
}

void SvgWriter::rectangle(Point corner, double width, double height, const char* fill,
                          std::string_view tooltip) {
  out_ << "<rect x=\"" << corner.x << "\" y=\"" << corner.y << "\" width=\"" << width
       << "\" height=\"" << height << "\"";
  fill_and_tooltip("rect", fill, tooltip);
}

void SvgWriter::line(Point from, Point to, const LineStyle& style) {
  out_ << "<line x1=\"" << from.x << "\" y1=\"" << from.y << "\" x2=\"" << to.x << "\" y2=\""
       << to.y << "\" stroke=\"" << style.stroke << "\" stroke-width=\"" << style.width << "\""
       << (style.dashed ? " stroke-dasharray=\"6 4\"" : "") << "/>\n";
}

void SvgWriter::polygon(const std::vector<Point>& points, const char* fill,
                        std::string_view tooltip) {
  out_ << "<polygon points=\"";
  for (const Point& point : points) out_ << point.x << "," << point.y << " ";
  out_ << "\"";
  fill_and_tooltip("polygon", fill, tooltip);
}

void SvgWriter::circle(Point centre, double radius, const char* fill, std::string_view tooltip) {
  out_ << "<circle cx=\"" << centre.x << "\" cy=\"" << centre.y << "\" r=\"" << radius << "\"";
  fill_and_tooltip("circle", fill, tooltip);
}

void SvgWriter::ring(Point centre, double radius, const char* stroke, std::string_view tooltip) {
  out_ << "<circle cx=\"" << centre.x << "\" cy=\"" << centre.y << "\" r=\"" << radius
       << "\" stroke-width=\"2\" pointer-events=\"all\" stroke=\"" << stroke << "\"";
  fill_and_tooltip("circle", "none", tooltip);
}

void SvgWriter::text(Point baseline, std::string_view words, const TextStyle& style) {
  out_ << "<text x=\"" << baseline.x << "\" y=\"" << baseline.y << "\" font-size=\"" << style.size
       << "\" text-anchor=\"" << style.anchor << "\" fill=\"" << style.fill << "\""
       << (style.bold ? " font-weight=\"bold\"" : "") << ">" << escaped_markup(words)
       << "</text>\n";
}

std::string SvgWriter::finish() {
  out_ << "</svg>\n";
  return out_.str();
}

}  // namespace distmoe::tools
