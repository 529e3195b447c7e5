// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a written file reads back as it was given, however the bytes were cut into pieces, and
// a file that lacks bytes never appears.
#include "io/safetensors_writer.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <vector>

#include "io/expect_error.hpp"
#include "io/safetensors.hpp"
#include "io/temporary_directory.hpp"
#include "io/write_safetensors.hpp"

namespace distmoe {
namespace {

using testing::expect_error;
using testing::NamedTensor;
using testing::TemporaryDirectory;

constexpr std::array<std::byte, 12> kRows{std::byte{1}, std::byte{2}, std::byte{3}};

const std::vector<TensorEntry> kY = {{"y", DType::kBF16, {2, 3}}};

TEST(SafetensorsWriter, WritesTheLayoutOfTheFormat) {
  const TemporaryDirectory directory;
  SafetensorsWriter writer(directory / "f", kY);
  writer.append(std::span(kRows).first(5));
  writer.append(std::span(kRows).subspan(5));
  EXPECT_FALSE(std::filesystem::exists(directory / "f"));
  writer.commit();
  const std::string text = testing::read_file(directory / "f");
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, text.data(), sizeof header_bytes);
  EXPECT_EQ(header_bytes % 8, 0u);
  const std::string header = text.substr(8, header_bytes);
  EXPECT_EQ(header.substr(0, header.find_last_not_of(' ') + 1),
            R"({"y":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}})");
  EXPECT_EQ(text.substr(8 + header_bytes),
            std::string(reinterpret_cast<const char*>(kRows.data()), kRows.size()));
}

TEST(SafetensorsWriter, KeepsMetadata) {
  const TemporaryDirectory directory;
  const Metadata metadata{{"format", "pt"}, {"quoted \"key\"", "two\nlines"}};
  SafetensorsWriter writer(directory / "f", kY, metadata);
  writer.append(kRows);
  writer.commit();
  EXPECT_EQ(SafetensorsFile::open(directory / "f").metadata(), metadata);
}

TEST(SafetensorsWriter, ReadsBackWhatWasWritten) {
  const std::array<std::uint8_t, 3> bytes = {1, 2, 3};
  const std::array<std::uint16_t, 5> halves = {10, 20, 30, 40, 50};
  const std::array<double, 2> wide = {1.5, -2.5};
  void* const nothing = nullptr;
  const std::vector<NamedTensor> tensors = {
      {"bytes", TensorView(bytes.data(), DType::kU8, {3, 1})},
      {"y", TensorView(halves.data(), DType::kBF16, {1, 5})},
      {"wide \"1\"", TensorView(wide.data(), DType::kF64, {2})},
      {"empty", TensorView(nothing, DType::kF32, {0, 7})}};
  const TemporaryDirectory directory;
  testing::write_safetensors(directory / "f", tensors);
  const SafetensorsFile file = SafetensorsFile::open(directory / "f");
  ASSERT_EQ(file.tensors().size(), 4u);
  for (const NamedTensor& given : tensors) {
    const StoredTensor* stored = file.find(given.name);
    ASSERT_NE(stored, nullptr) << given.name;
    EXPECT_EQ(stored->dtype, given.tensor.dtype);
    ASSERT_EQ(stored->shape.size(), static_cast<std::size_t>(given.tensor.rank));
    EXPECT_TRUE(std::equal(stored->shape.begin(), stored->shape.end(), given.tensor.shape.begin()));
    ASSERT_EQ(stored->data.size(), given.tensor.num_bytes());
    if (stored->data.empty()) continue;
    EXPECT_EQ(std::memcmp(stored->data.data(), given.tensor.data, stored->data.size()), 0);
  }
}

TEST(SafetensorsWriter, RefusesToCommitWhatIsIncomplete) {
  const TemporaryDirectory directory;
  {
    SafetensorsWriter writer(directory / "f", kY);
    writer.append(std::span(kRows).first(10));
    expect_error(ErrorCode::kInternal, {"/f", "lacks 2 bytes"}, [&] { writer.commit(); });
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(SafetensorsWriter, RefusesSizesBeyond64BitsAndLeavesNothing) {
  const TemporaryDirectory directory;
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
  const std::vector<TensorEntry> huge = {{"y", DType::kBF16, {kLargest, 3}}};
  expect_error(ErrorCode::kInvalidArgument, {"64 bits"},
               [&] { SafetensorsWriter writer(directory / "f", huge); });
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

}  // namespace
}  // namespace distmoe
