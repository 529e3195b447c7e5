// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "results/result_file.hpp"

namespace distmoe::tools {

/// Rows, in the order in which they came.
using ResultGroup = std::vector<const ResultRow*>;
using NamedGroup = std::pair<std::string, ResultGroup>;

inline void add_once(std::vector<std::string>& names, const std::string& name) {
  if (std::ranges::find(names, name) == names.end()) names.push_back(name);
}

/// Groups by what `name_of` calls a row, in the order of their first rows.
template <typename Name>
std::vector<NamedGroup> grouped_by(const ResultGroup& rows, const Name& name_of) {
  std::vector<NamedGroup> groups;
  for (const ResultRow* row : rows) {
    const std::string name = name_of(*row);
    auto found = std::ranges::find(groups, name, &NamedGroup::first);
    if (found == groups.end()) found = groups.insert(found, {name, {}});
    found->second.push_back(row);
  }
  return groups;
}

inline const std::string& machine_of(const ResultRow& row) { return row.machine; }

/// At most `most` of the rows, evenly spread, the first among them.
inline ResultGroup thinned(const ResultGroup& rows, std::size_t most) {
  if (rows.size() <= most) return rows;
  ResultGroup some;
  for (std::size_t i = 0; i < most; ++i) some.push_back(rows[i * rows.size() / most]);
  return some;
}

}  // namespace distmoe::tools
