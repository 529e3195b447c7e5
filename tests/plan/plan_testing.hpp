// SPDX-License-Identifier: Apache-2.0
//
// Small configurations and the check of an error's code and words.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "distmoe/config.hpp"
#include "distmoe/error.hpp"

namespace distmoe {

inline Config small_config() {
  Config config;
  config.max_tokens = 64;
  config.hidden_dim = 96;
  config.intermediate_dim = 160;
  config.top_k = 3;
  config.num_experts = 10;
  config.max_moe_layers_per_activation_slot = 2;
  return config;
}

/// Expects that `action` throws `code` with every one of `words` in its message.
template <typename Action, typename... Words>
void expect_error(ErrorCode code, const Action& action, const Words&... words) {
  try {
    action();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    const std::string message = error.what();
    for (const std::string& word : {std::string(words)...}) {
      EXPECT_NE(message.find(word), std::string::npos) << "'" << word << "' not in: " << message;
    }
  }
}

}  // namespace distmoe
