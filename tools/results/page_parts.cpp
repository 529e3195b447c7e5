// SPDX-License-Identifier: Apache-2.0
#include "results/page_parts.hpp"

#include <algorithm>
#include <array>

#include "core/check.hpp"
#include "number_text.hpp"
#include "results/page_style.hpp"
#include "results/result_groups.hpp"
#include "svg_writer.hpp"

namespace distmoe::tools {
namespace {

constexpr int kNumColours = 10;
/// Grey last.
constexpr std::array kSeriesColours = {0, 1, 2, 3, 4, 5, 6, 8, 9, 7};

std::string width_of(double fraction) {
  return concat("style=\"width:", number_text(100.0 * std::clamp(fraction, 0.0, 1.0), 2), "%\"");
}

/// Of all parts, in their order.
std::vector<std::string> names_of(const std::vector<Stack>& stacks) {
  std::vector<std::string> names;
  for (const Stack& stack : stacks) {
    for (const NamedValue& part : stack.parts) add_once(names, part.name);
  }
  return names;
}

}  // namespace

std::string time_text(double us) {
  const auto scaled = [](double value, const char* unit) {
    return concat(number_text(value, value < 10.0 ? 2 : value < 100.0 ? 1 : 0), " ", unit);
  };
  if (us < 1e3) return scaled(us, "us");
  if (us < 1e6) return scaled(us * 1e-3, "ms");
  return scaled(us * 1e-6, "s");
}

std::string rates_text(const ResultRow& row) {
  return concat(number_or_dash(row.dense_tflops, 3), " TFLOP/s, copy ",
                number_or_dash(row.copy_tb_s, 3), " TB/s, read ", number_or_dash(row.read_tb_s, 3),
                " TB/s, write ", number_or_dash(row.write_tb_s, 3), " TB/s");
}

std::string tokens_text(const ResultRow& row) { return concat("T = ", row.tokens); }

std::string ranks_suffix(const ResultRow& row) {
  if (row.ranks == 1) return {};
  return concat(", ", row.ranks, " ranks", row.engine == "threads" ? "" : " over " + row.engine);
}

std::string unstable_suffix(const ResultRow& row) { return row.is_unstable ? ", unstable" : ""; }

void LimitedText::add(const std::string& piece) {
  if (text_.size() + piece.size() <= most_bytes_) {
    text_ += piece;
  } else {
    ++num_left_out_;
  }
}

std::string LimitedText::left_out(const char* what) const {
  if (num_left_out_ == 0) return {};
  return concat("<p class=\"note\">", num_left_out_, " more ", what,
                " are left out, so that the page stays small: give fewer results.</p>\n");
}

std::string size_text(const ResultRow& row) { return tokens_text(row) + ranks_suffix(row); }

std::string bars_of(const std::vector<Bar>& bars) {
  std::string html;
  for (const Bar& bar : bars) {
    html +=
        concat("<div class=\"bar\"><span>", escaped_markup(bar.name),
               bar.is_unstable ? kUnstableBadge : "", "</span><div class=\"track\" title=\"",
               percent_text(bar.fraction), " of the floor\"><i class=\"c", bar.colour, "\" ",
               width_of(bar.fraction), "></i></div><span class=\"v\">", escaped_markup(bar.value),
               "</span><span class=\"v muted\">", escaped_markup(bar.ratio), "</span></div>\n");
  }
  return html;
}

std::string stacks_of(const std::vector<Stack>& stacks, std::string (*text_of)(double)) {
  const std::vector<std::string> names = names_of(stacks);
  const auto value_of = [](const Stack& stack, const std::string& name) {
    const auto part = std::ranges::find(stack.parts, name, &NamedValue::name);
    return part == stack.parts.end() ? 0.0 : part->value;
  };
  std::string bars;
  std::string table = "<div class=\"scroll\"><table class=\"parts\"><tr><th></th>";
  for (const Stack& stack : stacks) {
    double sum = 0.0;
    for (const NamedValue& part : stack.parts) sum += part.value;
    bars += concat("<div class=\"whole\"><span>", escaped_markup(stack.label),
                   "</span><div class=\"stack\">");
    for (std::size_t i = 0; i < names.size() && sum > 0.0; ++i) {
      const double value = value_of(stack, names[i]);
      bars += concat("<i class=\"c", i % kNumColours, "\" ", width_of(value / sum), " title=\"",
                     escaped_markup(names[i]), ": ", text_of(value), ", ",
                     percent_text(value / sum), "\"></i>");
    }
    bars += "</div></div>\n";
    table += concat("<th>", escaped_markup(stack.label), "</th>");
  }
  table += "</tr>\n";
  for (std::size_t i = 0; i < names.size(); ++i) {
    table += concat("<tr><td><i class=\"dot c", i % kNumColours, "\"></i>",
                    escaped_markup(names[i]), "</td>");
    for (const Stack& stack : stacks) {
      table += concat("<td>", text_of(value_of(stack, names[i])), "</td>");
    }
    table += "</tr>\n";
  }
  return bars + table + "</table></div>\n";
}

std::string card(const std::string& title, const std::string& body) {
  return concat("<section class=\"card\"><h3>", escaped_markup(title), "</h3>\n", body,
                "</section>\n");
}

std::string section(const char* title, const char* words, const char* layout,
                    const LimitedText& cards) {
  if (cards.is_empty()) return {};
  return concat("<h2>", title, "</h2>\n<p class=\"muted\">", words, "</p>\n<div class=\"", layout,
                "\">\n", cards.text(), "</div>\n", cards.left_out("cards"));
}

int series_colour(std::size_t index) { return kSeriesColours[index % kSeriesColours.size()]; }

std::string page_head(std::string_view title) {
  return concat("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n",
                "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>",
                escaped_markup(title), "</title>\n<link rel=\"icon\" href=\"data:,\">\n<style>",
                kPageStyle, "</style>\n</head>\n<body>\n<main>\n");
}

std::string figure(const std::string& drawing, const std::string& caption) {
  return concat("<figure>", drawing, caption.empty() ? "" : "<figcaption>", escaped_markup(caption),
                caption.empty() ? "" : "</figcaption>", "</figure>\n");
}

}  // namespace distmoe::tools
