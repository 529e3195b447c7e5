// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <string_view>

namespace distmoe::tools {

/// Replaces the file at once, so that a failure leaves no part of it. Throws io, naming the path.
void write_text_file(const std::filesystem::path& path, std::string_view text);

}  // namespace distmoe::tools
