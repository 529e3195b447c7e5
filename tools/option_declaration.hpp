// SPDX-License-Identifier: Apache-2.0
//
// How the subcommands declare options whose text one function reads.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "option_values.hpp"

namespace distmoe::tools {

inline CLI::Option* add(CLI::App& app, const char* name, const char* type, const char* help,
                        const std::function<void(const std::string&)>& read) {
  return app.add_option_function<std::string>(name, read, help)->type_name(type);
}

/// `name` may have a short form behind a comma. `path` outlives the parsing of `app`.
inline CLI::Option* add_path(CLI::App& app, const std::string& name, const char* type,
                             const char* help, std::filesystem::path& path) {
  return add(app, name.c_str(), type, help,
             [option = name.substr(0, name.find(',')), &path](const std::string& text) {
               path = parse_path(option, text);
             });
}

/// An integer in [1, most].
template <typename Store>
CLI::Option* add_count(CLI::App& app, const char* name, const char* help, std::int64_t most,
                       Store store) {
  return add(app, name, "N", help, [name, most, store](const std::string& text) {
    store(parse_integer(name, text, 1, most));
  });
}

}  // namespace distmoe::tools
