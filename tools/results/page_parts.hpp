// SPDX-License-Identifier: Apache-2.0
//
// Pieces of the page that `distmoe report` writes, as HTML text.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "results/result_file.hpp"

namespace distmoe::tools {

/// "1.24 ms", "37.5 us", "2.1 s".
std::string time_text(double us);
/// "700.000 TFLOP/s, copy 4.250 TB/s, read 4.500 TB/s": dense products first.
std::string rates_text(const ResultRow& row);

/// What a card shows of one call: more is thinned out.
inline constexpr std::size_t kMostRowsOfACard = 24;
inline constexpr std::size_t kMostRowsOfAChart = 200;

/// Behind what varies too much from round to round.
inline constexpr const char* kUnstableBadge = " <span class=\"badge\">unstable</span>";
inline constexpr const char* kWrongBadge = " <span class=\"badge wrong\">wrong</span>";

/// ", unstable" of such a row.
std::string unstable_suffix(const ResultRow& row);

/// "T = 64".
std::string tokens_text(const ResultRow& row);
/// ", 2 ranks", ", 2 ranks over mpi"; empty of one.
std::string ranks_suffix(const ResultRow& row);
/// "T = 64, 2 ranks".
std::string size_text(const ResultRow& row);

struct Bar {
  std::string name;
  double fraction = 0.0;  ///< of the track, at most 1
  std::string value;
  std::string ratio;  ///< behind the value; may be empty
  int colour = 0;
  bool is_unstable = false;
};
std::string bars_of(const std::vector<Bar>& bars);

/// A whole and its parts.
struct Stack {
  std::string label;
  std::vector<NamedValue> parts;
};
/// A bar for each whole, and a table of all parts below that has their colours.
std::string stacks_of(const std::vector<Stack>& stacks, std::string (*text_of)(double));

std::string card(const std::string& title, const std::string& body);

/// HTML, and how much of it there may be: pieces that do not fit are counted in place of added.
class LimitedText {
 public:
  explicit LimitedText(std::size_t most_bytes) : most_bytes_(most_bytes) {}
  void add(const std::string& piece);
  bool is_empty() const { return text_.empty() && num_left_out_ == 0; }
  const std::string& text() const { return text_; }
  /// A paragraph that says how many `what` are missing; empty where none is.
  std::string left_out(const char* what) const;

 private:
  std::size_t most_bytes_;
  std::string text_;
  std::size_t num_left_out_ = 0;
};

/// Cards below a title and words of HTML, nothing where there are none. `layout`: a class of the
/// style, "grid" or "wide".
std::string section(const char* title, const char* words, const char* layout,
                    const LimitedText& cards);

/// What series of a chart and their legend have, in turn: the number of a class of the style.
int series_colour(std::size_t index);

/// The head of the page, up to the opening of <main>.
std::string page_head(std::string_view title);

/// One figure with a caption below it; either may be empty.
std::string figure(const std::string& drawing, const std::string& caption);

}  // namespace distmoe::tools
