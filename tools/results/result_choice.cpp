// SPDX-License-Identifier: Apache-2.0
#include "results/result_choice.hpp"

#include <algorithm>
#include <map>
#include <tuple>

#include "core/check.hpp"
#include "results/page_parts.hpp"

namespace distmoe::tools {
namespace {

std::string replacement_text(const ResultRow& kept, const ResultGroup& all) {
  std::string text = concat(kept.shape, ", ", kept.call(), ", ", size_text(kept), ": that of ",
                            kept.date, " counts, not");
  const char* before = " ";
  for (const ResultRow* row : all) {
    if (row == &kept) continue;
    text += before + row->date;
    before = ", ";
  }
  return text;
}

}  // namespace

ResultChoice choose_results(std::span<const ResultRow> rows) {
  using Key = std::tuple<std::string, std::string, std::string, std::string, std::string,
                         std::int64_t, std::int64_t>;
  std::map<Key, ResultGroup> calls;
  const auto key_of = [](const ResultRow& row) {
    return Key{row.machine, row.shape, row.call(), row.backend, row.engine, row.tokens, row.ranks};
  };
  for (const ResultRow& row : rows) calls[key_of(row)].push_back(&row);
  ResultChoice choice;
  for (const ResultRow& row : rows) {
    const ResultGroup& all = calls[key_of(row)];
    // Dates are in ISO 8601, so that their letters are in their order; of equal ones the last.
    const auto newest = std::ranges::max_element(
        all.rbegin(), all.rend(), {}, [](const ResultRow* result) { return result->date; });
    if (*newest != &row) continue;
    choice.shown.push_back(&row);
    if (all.size() > 1) choice.again.push_back(replacement_text(row, all));
  }
  return choice;
}

ResultGroup right_of(const ResultGroup& rows) {
  ResultGroup right = rows;
  std::erase_if(right, [](const ResultRow* row) { return row->is_wrong(); });
  return right;
}

}  // namespace distmoe::tools
