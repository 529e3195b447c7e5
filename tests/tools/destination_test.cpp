// SPDX-License-Identifier: Apache-2.0
// Invariant: an output is refused, by the option and the path that name it, wherever writing it
// would fail or would replace what must stay: a device, or what the run reads or looks for.
#include "destination.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "distmoe/error.hpp"
#include "io/temporary_directory.hpp"

namespace distmoe::tools {
namespace {

namespace fs = std::filesystem;

class DestinationTest : public ::testing::Test {
 protected:
  DestinationTest() { distmoe::testing::write_file(directory_ / "input", "x"); }

  void check(const fs::path& path) const {
    check_destination("--output", path, {directory_ / "input", directory_ / "absent"});
  }

  void expect_refused(const fs::path& path, const std::string& reason) const {
    try {
      check(path);
      ADD_FAILURE() << path << " was not refused";
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_EQ(message.rfind("--output names \"" + path.string() + '"', 0), 0u) << message;
      EXPECT_NE(message.find(reason), std::string::npos) << message;
    }
  }

  distmoe::testing::TemporaryDirectory directory_;
};

TEST_F(DestinationTest, MayBeANameOfItsOwnWhetherItExistsOrNot) {
  EXPECT_NO_THROW(check(directory_ / "y"));
  distmoe::testing::write_file(directory_ / "y", "old");
  EXPECT_NO_THROW(check(directory_ / "y"));
  fs::create_directory(directory_ / "folder");
  EXPECT_NO_THROW(check(directory_ / "folder/absent")) << "only the name is the same";
}

TEST_F(DestinationTest, IsRefusedWhereNothingCanBeWritten) {
  fs::create_symlink("loop", directory_ / "loop");
  expect_refused("/dev/null", "not a regular file");
  expect_refused(directory_.path(), "which is a folder; legal: a file, such as \"");
  expect_refused(directory_ / "missing/", "which is a folder");
  expect_refused(directory_ / "loop", "not a regular file");
  expect_refused(directory_ / "missing/y", "no folder");
}

TEST_F(DestinationTest, IsRefusedWhereItWouldReplaceWhatIsKeptUnderAnyName) {
  fs::create_symlink("input", directory_ / "link");
  fs::create_symlink("absent", directory_ / "dangling");
  fs::create_directory_symlink(".", directory_ / "folder");
  for (const char* name : {"input", "link", "folder/input", "./input", "folder/link"}) {
    expect_refused(directory_ / name, "would replace \"" + (directory_ / "input").string());
  }
  for (const char* name : {"absent", "dangling", "folder/absent"}) {
    expect_refused(directory_ / name, "would replace \"" + (directory_ / "absent").string());
  }
}

}  // namespace
}  // namespace distmoe::tools
