// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a written file reads back as it was given, and a failure leaves neither a new file nor
// a changed old one.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <array>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <vector>

#include "io/expect_error.hpp"
#include "io/safetensors.hpp"
#include "io/temporary_directory.hpp"

namespace distmoe {
namespace {

using testing::expect_error;
using testing::TemporaryDirectory;

std::size_t count_entries(const std::filesystem::path& directory) {
  const std::filesystem::directory_iterator entries(directory);
  return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}

class SafetensorsWriter : public ::testing::Test {
 protected:
  std::vector<NamedTensor> tensors() {
    return {{"bytes", TensorView(bytes_.data(), DType::kU8, {3, 1})},
            {"y", TensorView(halves_.data(), DType::kBF16, {1, 5})},
            {"wide", TensorView(wide_.data(), DType::kF64, {2})},
            {"empty", TensorView(nullptr_, DType::kF32, {0, 7})}};
  }

  TemporaryDirectory directory_;
  std::array<std::uint8_t, 3> bytes_ = {1, 2, 3};
  std::array<std::uint16_t, 5> halves_ = {10, 20, 30, 40, 50};
  std::array<double, 2> wide_ = {1.5, -2.5};
  void* nullptr_ = nullptr;
};

TEST_F(SafetensorsWriter, ReadsBackWhatWasWritten) {
  write_safetensors(directory_ / "f", tensors(), {{"key \"1\"", "v\n"}});
  const SafetensorsFile file = SafetensorsFile::open(directory_ / "f");
  EXPECT_EQ(file.metadata(), (Metadata{{"key \"1\"", "v\n"}}));
  ASSERT_EQ(file.tensors().size(), 4u);
  for (const NamedTensor& given : tensors()) {
    const StoredTensor* stored = file.find(given.name);
    ASSERT_NE(stored, nullptr) << given.name;
    EXPECT_EQ(stored->dtype, given.tensor.dtype);
    ASSERT_EQ(stored->shape.size(), static_cast<std::size_t>(given.tensor.rank));
    EXPECT_TRUE(std::equal(stored->shape.begin(), stored->shape.end(), given.tensor.shape.begin()));
    ASSERT_EQ(stored->data.size(), given.tensor.num_bytes());
    if (stored->data.empty()) continue;
    EXPECT_EQ(std::memcmp(stored->data.data(), given.tensor.data, stored->data.size()), 0);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(stored->data.data()) % size_of(*stored->dtype), 0u)
        << given.name << " is not aligned";
  }
  EXPECT_EQ(count_entries(directory_.path()), 1u) << "a temporary file is left";
}

TEST_F(SafetensorsWriter, ReplacesAFileAndFollowsALink) {
  testing::write_file(directory_ / "real", "old");
  std::filesystem::create_symlink("real", directory_ / "link");
  write_safetensors(directory_ / "link", tensors());
  EXPECT_TRUE(std::filesystem::is_symlink(directory_ / "link"));
  EXPECT_EQ(SafetensorsFile::open(directory_ / "real").tensors().size(), 4u);
}

TEST_F(SafetensorsWriter, RefusesTensorsThatCannotBeWritten) {
  const TensorView view(bytes_.data(), DType::kU8, {3});
  TensorView strided = TensorView::strided(halves_.data(), DType::kBF16, {2, 2}, {3, 1});
  TensorView on_device(bytes_.data(), DType::kU8, {3}, {DeviceType::kCuda, 0});
  const std::vector<std::vector<NamedTensor>> bad = {
      {{"a", view}, {"a", view}}, {{"__metadata__", view}},
      {{"a", strided}},           {{"a", on_device}},
      {{"a", TensorView()}},      {{"a", TensorView(nullptr_, DType::kU8, {3})}},
      {{"\xFF", view}},
  };
  testing::write_file(directory_ / "f", "old");
  for (const auto& list : bad) {
    expect_error(ErrorCode::kInvalidArgument, {},
                 [&] { write_safetensors(directory_ / "f", list); });
  }
  EXPECT_EQ(testing::read_file(directory_ / "f"), "old");
  EXPECT_EQ(count_entries(directory_.path()), 1u);
}

TEST_F(SafetensorsWriter, RefusesTargetsThatAreNoFile) {
  expect_error(ErrorCode::kIo, {"No such file"},
               [&] { write_safetensors(directory_ / "absent" / "f", tensors()); });
  expect_error(ErrorCode::kIo, {"not a regular file"},
               [&] { write_safetensors(directory_.path(), tensors()); });
  expect_error(ErrorCode::kIo, {"not a regular file"},
               [&] { write_safetensors("/dev/null", tensors()); });
  struct stat status {};
  ASSERT_EQ(::stat("/dev/null", &status), 0);
  EXPECT_TRUE(S_ISCHR(status.st_mode)) << "/dev/null was replaced";
}

// A file-size limit stands for a full disk: the write fails after part of the data.
TEST_F(SafetensorsWriter, LeavesNothingBehindWhenTheDiskIsFull) {
  testing::write_file(directory_ / "f", "old");
  std::vector<float> large(1 << 16, 1.0f);
  const std::vector<NamedTensor> list = {
      {"large", TensorView(large.data(), DType::kF32, {1 << 16})}};
  rlimit saved{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &saved), 0);
  const auto saved_handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{4096, saved.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  expect_error(ErrorCode::kIo, {"File too large", "/f"},
               [&] { write_safetensors(directory_ / "f", list); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &saved), 0);
  std::signal(SIGXFSZ, saved_handler);
  EXPECT_EQ(testing::read_file(directory_ / "f"), "old");
  EXPECT_EQ(count_entries(directory_.path()), 1u);
}

}  // namespace
}  // namespace distmoe
