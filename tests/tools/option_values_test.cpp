// SPDX-License-Identifier: Apache-2.0
// Invariant: an option value is either read completely and within its range, or refused with the
// option, the text and what is legal; nothing is clamped, truncated or read as another number.
#include "option_values.hpp"

#include <gtest/gtest.h>

#include "distmoe/error.hpp"

namespace distmoe::tools {
namespace {

template <typename Read>
std::string refusal(const Read& read) {
  try {
    read();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "not refused";
}

TEST(ParseInteger, AcceptsBothEndsOfTheRange) {
  EXPECT_EQ(parse_integer("--layer", "0", 0, 7), 0);
  EXPECT_EQ(parse_integer("--layer", "7", 0, 7), 7);
  EXPECT_EQ(parse_integer("--layer", "010", 0, 100), 10) << "decimal, never octal";
}

TEST(ParseInteger, RefusesEverythingElse) {
  for (const char* text : {"", " 1", "1 ", "+1", "-1", "8", "1.0", "1e0", "0x1", "true", "one",
                           "9223372036854775808", "4294967297"}) {
    EXPECT_NE(refusal([&] { parse_integer("--layer", text, 0, 7); }).find("0..7"),
              std::string::npos)
        << text;
  }
}

TEST(ParseInteger, NamesOptionTextAndRange) {
  EXPECT_EQ(refusal([] { parse_integer("--ranks", "0", 1, 1024); }),
            "--ranks is '0'; legal: an integer 1..1024");
}

TEST(ParseReal, AcceptsFiniteNumbers) {
  EXPECT_EQ(parse_real("--tolerance", "8e-3", Zero::kLegal), 8e-3);
  EXPECT_EQ(parse_real("--tolerance", "0", Zero::kLegal), 0.0);
  EXPECT_EQ(parse_real("--device-factor", "1.5", Zero::kIllegal), 1.5);
}

TEST(ParseReal, RefusesEverythingElse) {
  for (const char* text : {"", "nan", "inf", "-inf", "-1", "1e999", "1,5", "1.5x", "0x1p3", " 1"}) {
    EXPECT_NE(refusal([&] { parse_real("--tolerance", text, Zero::kLegal); }).find(">= 0"),
              std::string::npos)
        << text;
  }
  EXPECT_NE(refusal([] { parse_real("--timeout", "0", Zero::kIllegal); }).find("> 0"),
            std::string::npos);
}

TEST(ParseFinite, AcceptsEverySign) {
  EXPECT_EQ(parse_finite("--clip-limit", "-1.5"), -1.5);
  EXPECT_EQ(parse_finite("--clip-limit", "0"), 0.0);
  EXPECT_EQ(parse_finite("--clip-limit", "7"), 7.0);
  for (const char* text : {"", "nan", "inf", "-inf", "1e999", "1.5x", " 1"}) {
    EXPECT_EQ(refusal([&] { parse_finite("--clip-limit", text); }),
              std::string("--clip-limit is '") + text + "'; legal: a finite number");
  }
}

TEST(ParsePath, TakesAnyTextButNone) {
  EXPECT_EQ(parse_path("--output", " a b"), std::filesystem::path(" a b"));
  EXPECT_EQ(refusal([] { parse_path("--output", ""); }), "--output is empty; legal: a path");
}

TEST(ParseTokenCounts, ReadsZerosAndSingleEntries) {
  EXPECT_EQ(parse_token_counts("--tokens-per-rank", "5", 1), (std::vector<std::int64_t>{5}));
  EXPECT_EQ(parse_token_counts("--tokens-per-rank", "500,0,12", 3),
            (std::vector<std::int64_t>{500, 0, 12}));
}

TEST(ParseTokenCounts, RefusesEmptyNegativeAndOverflowingLists) {
  for (const char* text :
       {"", ",", "1,", ",1", "1,,2", "1,-1", "1;2", "1, 2", "9223372036854775807,1"}) {
    EXPECT_NE(refusal([&] { parse_token_counts("--tokens-per-rank", text, 8); }), "not refused")
        << text;
  }
}

TEST(ParseTokenCounts, RefusesMoreEntriesThanThereMayBeRanks) {
  EXPECT_EQ(refusal([] { parse_token_counts("--tokens-per-rank", "1,0,1,1", 3); }),
            "--tokens-per-rank has 4 entries; legal: 1..3, one a rank");
}

TEST(ParseName, ListsTheLegalNames) {
  EXPECT_EQ(parse_name("--engine", "mpi", {"threads", "mpi"}), 1);
  EXPECT_EQ(refusal([] {
              parse_name("--engine", "MPI", {"threads", "mpi"});
            }),
            "--engine is 'MPI'; legal: threads or mpi");
}

}  // namespace
}  // namespace distmoe::tools
