// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a file exists under its name only when it is complete; until then, and after any
// failure, there is nothing new beside it, and what was there before is as it was.
#include "io/atomic_file.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "io/expect_error.hpp"
#include "io/temporary_directory.hpp"

namespace distmoe {
namespace {

namespace fs = std::filesystem;
using testing::expect_error;
using testing::TemporaryDirectory;

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

void write(const fs::path& path, std::string_view text) {
  AtomicFile file(path);
  file.write(bytes_of(text));
  file.commit();
}

class AtomicFileTest : public ::testing::Test {
 protected:
  std::ptrdiff_t num_entries() const {
    const fs::directory_iterator entries(directory_.path());
    return std::distance(begin(entries), end(entries));
  }

  TemporaryDirectory directory_;
};

TEST_F(AtomicFileTest, AppearsWithAllItsBytesAtTheCommit) {
  AtomicFile file(directory_ / "f");
  file.write(bytes_of("one "));
  file.write({});
  file.write(bytes_of("two"));
  EXPECT_FALSE(fs::exists(directory_ / "f"));
  file.commit();
  EXPECT_EQ(testing::read_file(directory_ / "f"), "one two");
  EXPECT_EQ(num_entries(), 1) << "a temporary file is left";
}

TEST_F(AtomicFileTest, ReplacesTheOldFileAtTheCommitAndNotBefore) {
  testing::write_file(directory_ / "f", "old");
  {
    AtomicFile file(directory_ / "f");
    file.write(bytes_of("new"));
    EXPECT_EQ(testing::read_file(directory_ / "f"), "old");
  }
  EXPECT_EQ(testing::read_file(directory_ / "f"), "old");
  write(directory_ / "f", "new");
  EXPECT_EQ(testing::read_file(directory_ / "f"), "new");
  EXPECT_EQ(num_entries(), 1);
}

// Process numbers repeat in containers, which share a folder and where every run may be process 1.
TEST_F(AtomicFileTest, IsNotInTheWayOfItselfOrOfWhatAKilledProcessLeft) {
  const std::string stale = "f." + std::to_string(getpid()) + ".partial";
  testing::write_file(directory_ / stale, "stale");
  AtomicFile first(directory_ / "f");
  AtomicFile second(directory_ / "f");
  first.write(bytes_of("first"));
  second.write(bytes_of("second"));
  first.commit();
  second.commit();
  EXPECT_EQ(testing::read_file(directory_ / "f"), "second");
  EXPECT_EQ(testing::read_file(directory_ / stale), "stale");
}

TEST_F(AtomicFileTest, WritesThroughLinksWhetherTheyLeadToAFileOrNot) {
  fs::create_directory(directory_ / "folder");
  testing::write_file(directory_ / "folder/real", "old");
  fs::create_symlink("real", directory_ / "folder/inner");
  fs::create_symlink("folder/inner", directory_ / "outer");
  fs::create_symlink("folder/absent", directory_ / "dangling");
  write(directory_ / "outer", "new");
  write(directory_ / "dangling", "first");
  EXPECT_TRUE(fs::is_symlink(directory_ / "outer"));
  EXPECT_TRUE(fs::is_symlink(directory_ / "folder/inner"));
  EXPECT_EQ(testing::read_file(directory_ / "folder/real"), "new");
  EXPECT_TRUE(fs::is_symlink(directory_ / "dangling"));
  EXPECT_EQ(testing::read_file(directory_ / "folder/absent"), "first");
}

TEST_F(AtomicFileTest, TakesTheLongestNameOfAFolder) {
  const fs::path path = directory_ / std::string(255, 'n');
  write(path, "long");
  EXPECT_EQ(testing::read_file(path), "long");
}

TEST_F(AtomicFileTest, RefusesTargetsThatAreNoFile) {
  fs::create_symlink("loop", directory_ / "loop");
  expect_error(ErrorCode::kIo, {"No such file", "/absent/f"},
               [&] { AtomicFile file(directory_ / "absent" / "f"); });
  for (const fs::path& path : {directory_.path(), directory_ / "loop", fs::path("/dev/null")}) {
    expect_error(ErrorCode::kIo, {"not a regular file"}, [&] { AtomicFile file(path); });
  }
  struct stat status {};
  ASSERT_EQ(::stat("/dev/null", &status), 0);
  EXPECT_TRUE(S_ISCHR(status.st_mode)) << "/dev/null was replaced";
}

// A file-size limit stands for a full disk: the write fails after part of the data.
TEST_F(AtomicFileTest, LeavesNothingBehindWhenTheDiskIsFull) {
  testing::write_file(directory_ / "f", "old");
  const std::string large(1 << 18, 'x');
  rlimit saved{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &saved), 0);
  const auto saved_handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{4096, saved.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  expect_error(ErrorCode::kIo, {"File too large", "/f"}, [&] { write(directory_ / "f", large); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &saved), 0);
  std::signal(SIGXFSZ, saved_handler);
  EXPECT_EQ(testing::read_file(directory_ / "f"), "old");
  EXPECT_EQ(num_entries(), 1);
}

TEST_F(AtomicFileTest, WhatAKilledProcessLeavesIsKnownAndRemoved) {
  const fs::path target = directory_ / "f";
  const auto left = [&] {
    std::vector<fs::path> files;
    for (const fs::directory_entry& entry : fs::directory_iterator(directory_.path())) {
      files.push_back(entry.path());
    }
    return files;
  };
  const pid_t child = fork();
  if (child == 0) {
    AtomicFile file(target);
    file.write(bytes_of("half"));
    ::kill(getpid(), SIGKILL);
  }
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  ASSERT_EQ(left().size(), 1U);
  EXPECT_TRUE(AtomicFile::is_temporary_of(target, left()[0]));
  EXPECT_FALSE(AtomicFile::is_temporary_of(directory_ / "g", left()[0]));
  EXPECT_FALSE(AtomicFile::is_temporary_of(target, target));
  EXPECT_TRUE(AtomicFile::remove_abandoned(left()[0]));
  EXPECT_EQ(num_entries(), 0);
  AtomicFile live(target);
  EXPECT_FALSE(AtomicFile::remove_abandoned(left()[0]));
  live.commit();
  EXPECT_EQ(num_entries(), 1);
}

}  // namespace
}  // namespace distmoe
