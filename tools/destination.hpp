// SPDX-License-Identifier: Apache-2.0
//
// Where the command may write: found out before any work is done.
#pragma once

#include <filesystem>
#include <string_view>
#include <vector>

namespace distmoe::tools {

/// Throws invalid_argument where `path`, given by `option`, cannot become an output: no such
/// folder, not writable, something else than a regular file, or one of `kept`, which this run reads
/// or looks for and which need not exist.
void check_destination(std::string_view option, const std::filesystem::path& path,
                       const std::vector<std::filesystem::path>& kept);

/// `path` has `text` when this returns, else it is as it was. Throws OutputError.
void write_file(const std::filesystem::path& path, std::string_view text);

}  // namespace distmoe::tools
