// SPDX-License-Identifier: Apache-2.0
// Invariant: an output exists under its name only when it is complete; until then, and after any
// failure, neither it nor a temporary file is there, and what was there before is as it was.
#include "output_file.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "distmoe/error.hpp"

namespace distmoe::tools {
namespace {

namespace fs = std::filesystem;

class OutputFileTest : public testing::Test {
 public:
  ~OutputFileTest() override { fs::remove_all(folder_); }

 protected:
  OutputFileTest() : folder_(fs::path(testing::TempDir()) / ("distmoe-output-" + name())) {
    fs::remove_all(folder_);
    fs::create_directory(folder_);
  }
  static std::string name() {
    return std::to_string(getpid()) + testing::UnitTest::GetInstance()->current_test_info()->name();
  }
  fs::path path() const { return folder_ / "y.safetensors"; }
  static std::string read(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  bool is_folder_empty() const { return fs::is_empty(folder_); }

  void expect_refused(const fs::path& destination, const std::string& reason) const {
    try {
      OutputFile::check_destination(destination, {folder_ / "input"});
      FAIL() << destination << " was not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << error.what();
    }
  }

  fs::path folder_;
};

constexpr std::array<std::byte, 12> kRows{std::byte{1}, std::byte{2}, std::byte{3}};

TEST_F(OutputFileTest, IsASafetensorsFileOfOneTensorAfterCommit) {
  OutputFile file(path(), 2, 3);
  file.append(std::span(kRows).first(5));
  file.append(std::span(kRows).subspan(5));
  EXPECT_FALSE(fs::exists(path()));
  file.commit();
  const std::string text = read(path());
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, text.data(), sizeof header_bytes);
  EXPECT_EQ(header_bytes % 8, 0u);
  const std::string header = text.substr(8, header_bytes);
  EXPECT_EQ(header.substr(0, header.find_last_not_of(' ') + 1),
            R"({"y":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}})");
  EXPECT_EQ(text.substr(8 + header_bytes),
            std::string(reinterpret_cast<const char*>(kRows.data()), kRows.size()));
}

TEST_F(OutputFileTest, LeavesNothingBehindWithoutCommit) {
  { OutputFile file(path(), 2, 3); }
  EXPECT_TRUE(is_folder_empty());
}

TEST_F(OutputFileTest, RefusesToCommitWhatIsIncomplete) {
  {
    OutputFile file(path(), 2, 3);
    file.append(std::span(kRows).first(10));
    EXPECT_THROW(file.commit(), Error);
  }
  EXPECT_TRUE(is_folder_empty());
}

TEST_F(OutputFileTest, KeepsTheOldFileUntilCommit) {
  std::ofstream(path()) << "old";
  {
    OutputFile file(path(), 2, 3);
    file.append(kRows);
  }
  EXPECT_EQ(read(path()), "old");
}

TEST_F(OutputFileTest, WritesThroughALink) {
  fs::create_symlink("target", path());
  OutputFile file(path(), 2, 3);
  file.append(kRows);
  file.commit();
  EXPECT_TRUE(fs::is_symlink(path()));
  EXPECT_TRUE(fs::is_regular_file(folder_ / "target"));
}

TEST_F(OutputFileTest, RefusesDestinationsThatARenameWouldDamage) {
  std::ofstream(folder_ / "input") << "x";
  fs::create_symlink("input", folder_ / "link");
  expect_refused("/dev/null", "not a regular file");
  expect_refused(folder_, "not a regular file");
  expect_refused(folder_ / "missing" / "y", "no folder");
  expect_refused(folder_ / "input", "an input of this run");
  expect_refused(folder_ / "link", "an input of this run");
  EXPECT_NO_THROW(OutputFile::check_destination(path(), {folder_ / "input"}));
}

}  // namespace
}  // namespace distmoe::tools
