// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <string_view>

#include "distmoe/error.hpp"

namespace distmoe::testing {

/// Runs `action`, expects an Error of `code` whose message has every one of `fragments`.
template <typename Action>
void expect_error(ErrorCode code, std::initializer_list<std::string_view> fragments,
                  Action action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_STREQ(to_string(error.code()), to_string(code)) << error.what();
    for (const std::string_view fragment : fragments) {
      EXPECT_NE(std::string_view(error.what()).find(fragment), std::string_view::npos)
          << "no \"" << fragment << "\" in: " << error.what();
    }
    return;
  }
  ADD_FAILURE() << "no error; expected " << to_string(code);
}

}  // namespace distmoe::testing
