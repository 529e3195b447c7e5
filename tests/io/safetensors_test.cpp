// SPDX-License-Identifier: Apache-2.0
//
// Invariant: what a well-formed file says is read as it stands, and whatever the format does not
// allow is an io error that names the file, before a byte outside it is read.
#include "io/safetensors.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <string>
#include <vector>

#include "io/expect_error.hpp"
#include "io/raw_safetensors.hpp"
#include "io/temporary_directory.hpp"

namespace distmoe {
namespace {

using testing::as_bytes;
using testing::expect_error;
using testing::raw_safetensors;

/// The bytes are copied to a block of exactly their size, so that AddressSanitizer sees a read
/// beyond them.
SafetensorsContents parse(const std::string& file) {
  const std::vector<char> exact(file.begin(), file.end());
  SafetensorsContents contents = parse_safetensors(std::as_bytes(std::span(exact)), "the-file");
  for (StoredTensor& tensor : contents.tensors) tensor.data = {};
  return contents;
}

void expect_refused(const std::string& file, std::string_view reason) {
  expect_error(ErrorCode::kIo, {"the-file", reason}, [&] { parse(file); });
}

std::string tensor(std::string_view name, std::string_view dtype, std::string_view shape,
                   std::string_view offsets) {
  std::string text = "\"";
  text.append(name).append(R"(":{"dtype":")").append(dtype).append(R"(","shape":)").append(shape);
  return text.append(R"(,"data_offsets":)").append(offsets).append("}");
}

TEST(Safetensors, ReadsTypesShapesDataAndMetadata) {
  const std::string header =
      R"({"__metadata__":{"format":"pt","a":"b"},)" + tensor("late", "I8", "[3]", "[6,9]") + "," +
      tensor("a.b", "BF16", "[1,3]", "[0,6]") + "," + tensor("none", "F32", "[0,4]", "[6,6]") +
      "," + tensor("scalar", "F32", "[]", "[9,13]") + "}  ";
  const std::string file = raw_safetensors(header, "abcdefghijklm");
  const SafetensorsContents contents = parse_safetensors(as_bytes(file), "the-file");
  ASSERT_EQ(contents.tensors.size(), 4u);
  EXPECT_EQ(contents.metadata, (Metadata{{"a", "b"}, {"format", "pt"}}));

  const StoredTensor& first = contents.tensors[0];
  EXPECT_EQ(first.name, "a.b");
  EXPECT_EQ(first.dtype, DType::kBF16);
  EXPECT_EQ(first.describe(), "BF16 [1, 3]");
  EXPECT_EQ(first.data.data(), as_bytes(file).data() + 8 + header.size());
  EXPECT_EQ(first.data.size(), 6u);
  const StoredTensor& late = contents.tensors[1];
  EXPECT_EQ(late.name, "late");
  EXPECT_FALSE(late.dtype) << "distmoe has no signed bytes";
  EXPECT_EQ(late.dtype_name, "I8");
  EXPECT_EQ(late.data[0], std::byte{'g'});
  EXPECT_EQ(contents.tensors[2].data.size(), 0u);
  EXPECT_EQ(contents.tensors[3].shape.size(), 0u);
}

TEST(Safetensors, ReadsAFileWithoutTensors) {
  EXPECT_TRUE(parse(raw_safetensors("{}", "")).tensors.empty());
}

TEST(Safetensors, KeepsATypeOfTheFutureByName) {
  const auto contents = parse(raw_safetensors("{" + tensor("t", "F3", "[5]", "[0,2]") + "}", "ab"));
  EXPECT_FALSE(contents.tensors.at(0).dtype);
  EXPECT_EQ(contents.tensors.at(0).dtype_name, "F3");
}

TEST(Safetensors, ChecksTheSizeOfPackedTypes) {
  EXPECT_EQ(
      parse(raw_safetensors("{" + tensor("t", "F4", "[6]", "[0,3]") + "}", "abc")).tensors.size(),
      1u);
  expect_refused(raw_safetensors("{" + tensor("t", "F4", "[5]", "[0,3]") + "}", "abc"),
                 "does not end at a byte");
}

TEST(Safetensors, RefusesFilesShorterThanTheyAnnounce) {
  expect_refused("", "has 0 bytes");
  expect_refused("1234567", "has 7 bytes");
  expect_refused(raw_safetensors("{}", "", 3), "truncated");
  expect_refused(raw_safetensors("{}", "", 99'999'999), "truncated");
  expect_refused(raw_safetensors("{}", "", 100'000'001), "at most 100000000");
  expect_refused(raw_safetensors("{}", "", ~std::uint64_t{0}), "at most 100000000");
  const std::string whole = raw_safetensors("{" + tensor("t", "U8", "[4]", "[0,4]") + "}", "abcd");
  for (std::size_t size = 0; size < whole.size(); ++size) {
    expect_error(ErrorCode::kIo, {"the-file"}, [&] { parse(whole.substr(0, size)); });
  }
  EXPECT_EQ(parse(whole).tensors.size(), 1u);
}

TEST(Safetensors, RefusesHeadersThatAreNoStrictJson) {
  const std::string entry = tensor("t", "U8", "[0]", "[0,0]");
  for (const std::string& header : std::vector<std::string>{
           "", " {}", "[]", "\xEF\xBB\xBF{}", "{", "{}x", "{}{}", "{" + entry + ",}", "{'a':1}",
           "{\"\xFF\":{}}", "{\"\xC0\xAF\":{}}", "{\"\\ud800\":{}}", std::string("{}\0x", 4),
           std::string("{\0}", 3), "{\"t\":{\"dtype\":\"U8\"", "null", "{\"a\":01}"}) {
    expect_error(ErrorCode::kIo, {"the safetensors header of the-file"},
                 [&] { parse(raw_safetensors(header, "")); });
  }
}

TEST(Safetensors, RefusesEntriesOfAnotherGrammar) {
  for (const char* entry :
       {"1",
        "null",
        "[]",
        "\"x\"",
        "true",
        "{}",
        R"({"dtype":"U8","shape":[0]})",
        R"({"dtype":"U8","data_offsets":[0,0]})",
        R"({"shape":[0],"data_offsets":[0,0]})",
        R"({"dtype":"U8","shape":[0],"data_offsets":[0]})",
        R"({"dtype":"U8","shape":[0],"data_offsets":[0,0,0]})",
        R"({"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":1})",
        R"({"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]})",
        R"({"dtype":"U8","shape":[0],"shape":[0],"data_offsets":[0,0]})",
        R"({"dtype":"U8","shape":[0],"data_offsets":[0,0],"data_offsets":[0,0]})",
        R"({"dtype":5,"shape":[0],"data_offsets":[0,0]})",
        R"({"dtype":"U8","shape":0,"data_offsets":[0,0]})",
        R"({"dtype":"U8","shape":[[0]],"data_offsets":[0,0]})",
        R"({"dtype":"U8","shape":[{}],"data_offsets":[0,0]})",
        R"({"dtype":"U8","shape":[-1],"data_offsets":[0,0]})",
        R"({"dtype":"U8","shape":[0.0],"data_offsets":[0,0]})",
        R"({"dtype":"U8","shape":[1e3],"data_offsets":[0,0]})",
        R"({"dtype":"U8","shape":["0"],"data_offsets":[0,0]})",
        R"({"dtype":"U8","shape":[0],"data_offsets":[-0,0]})",
        R"({"dtype":"U8","shape":[0],"data_offsets":[99999999999999999999,0]})"}) {
    expect_refused(raw_safetensors(std::string("{\"t\":") + entry + "}", ""), "'t'");
  }
  for (const char* metadata : {"1", "[]", R"({"a":1})", R"({"a":null})", R"({"a":{}})",
                               R"({"a":"1","a":"2"})", R"({},"__metadata__":{})"}) {
    expect_refused(raw_safetensors(std::string("{\"__metadata__\":") + metadata + "}", ""),
                   "the safetensors header");
  }
}

TEST(Safetensors, RefusesShapesAndOffsetsThatOverflow) {
  expect_refused(
      raw_safetensors("{" + tensor("t", "U8", "[4294967296,4294967296]", "[0,0]") + "}", ""),
      "does not fit in 64 bits");
  expect_refused(
      raw_safetensors("{" + tensor("t", "F64", "[1152921504606846976]", "[0,0]") + "}", ""),
      "does not fit in 64 bits");
  expect_refused(
      raw_safetensors("{" + tensor("t", "U8", "[18446744073709551615]", "[0,0]") + "}", ""),
      "beyond 2^63 - 1");
  expect_refused(
      raw_safetensors(
          "{" + tensor("t", "U8", "[8]", "[18446744073709551608,18446744073709551615]") + "}",
          "abcdefgh"),
      "of data that have 8 bytes");
  expect_refused(raw_safetensors("{" + tensor("t", "U8", "[8]", "[8,0]") + "}", "abcdefgh"),
                 "bytes 8 to 0");
  std::string shape = "[1";
  for (int i = 0; i < 32; ++i) shape += ",1";
  expect_refused(raw_safetensors("{" + tensor("t", "U8", shape + "]", "[0,1]") + "}", "a"),
                 "more than 32 dimensions");
}

TEST(Safetensors, RefusesGapsOverlapsAndWrongSizes) {
  const auto pair = [](std::string_view first, std::string_view second, std::string_view data) {
    return raw_safetensors(
        "{" + tensor("a", "U8", "[4]", first) + "," + tensor("b", "U8", "[4]", second) + "}", data);
  };
  EXPECT_EQ(parse(pair("[4,8]", "[0,4]", "abcdefgh")).tensors.size(), 2u);
  expect_refused(pair("[0,4]", "[0,4]", "abcd"), "inside the tensor before it");
  expect_refused(pair("[0,4]", "[3,7]", "abcdefg"), "inside the tensor before it");
  expect_refused(pair("[0,4]", "[5,9]", "abcdefghi"), "belong to no tensor");
  expect_refused(pair("[1,5]", "[5,9]", "abcdefghi"), "belong to no tensor");
  expect_refused(pair("[0,4]", "[4,8]", "abcdefghi"), "the last 1 bytes");
  expect_refused(pair("[0,4]", "[4,8]", "abcdefg"), "truncated or damaged");
  expect_refused(pair("[0,4]", "[4,7]", "abcdefg"),
                 "has 3 bytes, but its type U8 and shape need 4");
  expect_refused(raw_safetensors("{}", "x"), "the last 1 bytes");
}

TEST(Safetensors, RefusesTwoTensorsOfOneName) {
  expect_refused(raw_safetensors("{" + tensor("twin", "U8", "[1]", "[0,1]") + "," +
                                     tensor("twin", "U8", "[1]", "[1,2]") + "}",
                                 "ab"),
                 "two tensors named 'twin'");
  expect_refused(raw_safetensors("{" + tensor("tw\\u0069n", "U8", "[1]", "[0,1]") + "," +
                                     tensor("twin", "U8", "[1]", "[1,2]") + "}",
                                 "ab"),
                 "two tensors named 'twin'");
}

// A recursive parser would run out of stack, a tree out of memory.
TEST(Safetensors, RefusesDeepNestingAtItsFirstBracket) {
  for (const std::string_view opening : {"[", "{\"a\":"}) {
    std::string header = "{\"t\":";
    for (int depth = 0; depth < 1'000'000; ++depth) header += opening;
    expect_error(ErrorCode::kIo, {"the safetensors header of the-file"},
                 [&] { parse(raw_safetensors(header, "")); });
  }
}

TEST(Safetensors, EscapesNamesInMessages) {
  const std::string file =
      raw_safetensors("{" + tensor("a\\nb\\u001b[31m", "U8", "[2]", "[0,1]") + "}", "x");
  expect_refused(file, R"('a\x0ab\x1b[31m')");
  const std::string long_name(100'000, 'n');
  try {
    parse(raw_safetensors("{" + tensor(long_name, "U8", "[2]", "[0,1]") + "}", "x"));
    FAIL();
  } catch (const Error& error) {
    EXPECT_LT(std::string_view(error.what()).size(), 500u);
  }
}

TEST(SafetensorsFile, FindsTensorsByName) {
  const testing::TemporaryDirectory directory;
  testing::write_file(directory / "f",
                      raw_safetensors("{" + tensor("b", "U8", "[1]", "[0,1]") + "," +
                                          tensor("a", "U8", "[1]", "[1,2]") + "}",
                                      "xy"));
  SafetensorsFile opened = SafetensorsFile::open(directory / "f");
  const std::byte* address = opened.find("a")->data.data();
  const SafetensorsFile file = std::move(opened);
  ASSERT_NE(file.find("a"), nullptr);
  EXPECT_EQ(file.find("a")->data[0], std::byte{'y'});
  EXPECT_EQ(file.find("a")->data.data(), address) << "moving a file moves no tensor";
  EXPECT_EQ(file.find("b")->data[0], std::byte{'x'});
  EXPECT_EQ(file.find("c"), nullptr);
  EXPECT_EQ(file.find(""), nullptr);
}

TEST(SafetensorsFile, RefusesWhatIsNoReadableRegularFile) {
  const testing::TemporaryDirectory directory;
  expect_error(ErrorCode::kIo, {"/absent", "No such file"},
               [&] { SafetensorsFile::open(directory / "absent"); });
  expect_error(ErrorCode::kIo, {"not a regular file"},
               [&] { SafetensorsFile::open(directory.path()); });
  ASSERT_EQ(::mkfifo((directory / "fifo").c_str(), 0600), 0);
  expect_error(ErrorCode::kIo, {"not a regular file"},
               [&] { SafetensorsFile::open(directory / "fifo"); });
  testing::write_file(directory / "empty", "");
  expect_error(ErrorCode::kIo, {"/empty has 0 bytes"},
               [&] { SafetensorsFile::open(directory / "empty"); });
}

}  // namespace
}  // namespace distmoe
