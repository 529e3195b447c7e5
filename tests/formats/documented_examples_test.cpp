// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the table of examples in docs/formats.md is what the quantisers give.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iomanip>
#include <sstream>
#include <string>
#include <vector>

#include "formats/mxfp4.hpp"
#include "formats/mxfp8.hpp"
#include "formats/nvfp4.hpp"

namespace distmoe {
namespace {

constexpr std::size_t kBlock = 32;

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

/// The cells between the bars of a row of a table.
std::vector<std::string> cells_of(const std::string& line) {
  std::vector<std::string> cells;
  std::istringstream stream(line.substr(1));
  for (std::string cell; std::getline(stream, cell, '|');) cells.push_back(cell);
  return cells;
}

struct Block {
  std::array<BF16, kBlock> values{};
  std::array<std::uint8_t, kBlock> codes{};
  std::uint8_t scale = 0;
  float factor = 0.0f;
  std::array<double, kBlock> decoded{};
};

void quantise(const std::string& format, Block& block) {
  const BF16Rows row{block.values.data(), 1, format == "nvfp4" ? 16 : 32, 0};
  const DecodedRows<double> out{block.decoded.data(), 1, row.num_cols, 0};
  auto* fp8 = reinterpret_cast<E4M3*>(block.codes.data());
  if (format == "mxfp8") {
    E8M0 scale{};
    quantise_mxfp8_rows(row, {fp8, &scale});
    decode_mxfp8({fp8, &scale}, BlockShape::kRows, out);
    block.scale = scale.bits;
  } else if (format == "mxfp4") {
    E8M0 scale{};
    quantise_mxfp4(row, {block.codes.data(), &scale});
    decode_mxfp4({block.codes.data(), &scale}, out);
    block.scale = scale.bits;
  } else {
    E4M3 scale{};
    quantise_nvfp4_rows(row, {block.codes.data(), &scale}, &block.factor);
    decode_nvfp4({block.codes.data(), &scale}, out);
    for (double& value : block.decoded) value /= static_cast<double>(block.factor);
    block.scale = scale.bits;
  }
}

std::string hex(std::uint8_t byte) {
  std::ostringstream text;
  text << std::hex << std::setw(2) << std::setfill('0') << int{byte};
  return text.str();
}

std::string number(double value) {
  if (value != value) return "nan";
  std::ostringstream text;
  text << value;
  return text.str();
}

void check_example(const std::string& line) {
  SCOPED_TRACE(line);
  const std::vector<std::string> cells = cells_of(line);
  ASSERT_GE(cells.size(), 6u);
  const std::string format = words_of(cells[0]).front();
  Block block;
  const std::vector<std::string> values = words_of(cells[1]);
  for (std::size_t i = 0; i < values.size(); ++i) {
    block.values[i] = to_bf16(std::strtof(values[i].c_str(), nullptr));
  }
  quantise(format, block);
  if (format == "nvfp4") {
    EXPECT_EQ(cells[2], ' ' + number(static_cast<double>(block.factor)) + ' ');
  }
  EXPECT_EQ(cells[3], ' ' + hex(block.scale) + ' ');
  std::string codes = " ";
  const std::size_t num_bytes = format == "mxfp8" ? values.size() : (values.size() + 1) / 2;
  for (std::size_t i = 0; i < num_bytes; ++i) codes += hex(block.codes[i]) + ' ';
  EXPECT_EQ(cells[4], codes);
  std::string decoded = " ";
  for (std::size_t i = 0; i < values.size(); ++i) decoded += number(block.decoded[i]) + ' ';
  EXPECT_EQ(cells[5], decoded);
}

TEST(DocumentedExamples, AreWhatTheQuantisersGive) {
  std::ifstream page(DISTMOE_FORMATS_PAGE);
  ASSERT_TRUE(page.is_open());
  int num_examples = 0;
  bool is_table = false;
  for (std::string line; std::getline(page, line);) {
    if (line.starts_with("## ")) is_table = line == "## Examples";
    const bool is_example = is_table && (line.starts_with("| mx") || line.starts_with("| nv"));
    if (!is_example) continue;
    check_example(line);
    ++num_examples;
  }
  EXPECT_GE(num_examples, 9);
}

}  // namespace
}  // namespace distmoe
