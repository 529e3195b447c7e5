// SPDX-License-Identifier: Apache-2.0
//
// Invariant: headers, library and build system agree about the version.
#include "distmoe/version.hpp"

#include <gtest/gtest.h>

#include <string>

namespace distmoe {
namespace {

TEST(Version, HeadersLibraryAndBuildSystemAgree) {
  const std::string headers = std::to_string(DISTMOE_VERSION_MAJOR) + '.' +
                              std::to_string(DISTMOE_VERSION_MINOR) + '.' +
                              std::to_string(DISTMOE_VERSION_PATCH);
  EXPECT_EQ(version(), headers);
  EXPECT_EQ(headers, DISTMOE_PROJECT_VERSION);
}

}  // namespace
}  // namespace distmoe
