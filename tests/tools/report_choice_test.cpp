// SPDX-License-Identifier: Apache-2.0
// Invariant: the page of `distmoe report` keeps machines apart, says which rows are unstable, wrong
// or measured again, and stays below 2 MB whatever it is given.
#include <gtest/gtest.h>

#include <fstream>

#include "command_testing.hpp"

namespace distmoe::tools {
namespace {

using Json = nlohmann::ordered_json;

class ReportChoice : public CommandTest {
 protected:
  Json measured() {
    const CommandResult bench =
        run_words({"env", "CUDA_VISIBLE_DEVICES=", command_path(), "bench", "--rounds", "1",
                   "--shape", "64,32,8,2", "--tokens", "5", "--steps", "--json"});
    Json row = Json::parse(bench.output);
    row["unstable"] = false;
    return row;
  }
  std::string page_of(const std::vector<Json>& rows) {
    std::ofstream lines(file("results"));
    for (const Json& row : rows) lines << row.dump() << '\n';
    lines.close();
    const CommandResult result =
        run_words({command_path(), "report", file("results"), "-o", file("page")});
    EXPECT_EQ(result.exit_code, 0) << result.error;
    return read_file(file("page"));
  }
  std::string table() {
    return run_words({command_path(), "report", file("results"), "--markdown"}).output;
  }
};

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

TEST_F(ReportChoice, EveryMachineHasSectionsOfItsOwn) {
  Json one = measured();
  Json two = one;
  one["machine"] = "machine one";
  two["machine"] = "machine two";
  EXPECT_EQ(count_of(page_of({one}), "<h2 class=\"machine\">"), 0u);
  two["tokens"] = 50;
  const std::string page = page_of({one, two});
  for (const char* part : {"Every row</h2>", "Roofline</h2>", "Efficiency</h2>",
                           "How it was measured</h2>", "Memory plan</h2>"}) {
    EXPECT_EQ(count_of(page, part), 2u) << part;
  }
  EXPECT_NE(page.find("<h2 class=\"machine\">machine two</h2>"), std::string::npos);
  EXPECT_EQ(page.find("Scaling"), std::string::npos) << "one number of tokens on each";
  EXPECT_EQ(count_of(table(), "| shape | call |"), 2u);
}

TEST_F(ReportChoice, MachinesThatAPageCannotHoldAreCounted) {
  std::vector<Json> many(20, measured());
  for (std::size_t i = 0; i < many.size(); ++i) many[i]["machine"] = "machine " + std::to_string(i);
  EXPECT_NE(page_of(many).find("12 more machines are left out"), std::string::npos);
}

TEST_F(ReportChoice, UnstableRowsAreRingsAndSaySo) {
  Json row = measured();
  EXPECT_EQ(page_of({row}).find("pointer-events"), std::string::npos);
  row["unstable"] = true;
  row["spread"] = 0.5;
  const std::string page = page_of({row});
  EXPECT_NE(page.find("pointer-events=\"all\""), std::string::npos);
  EXPECT_NE(page.find(" TFLOP/s, unstable</title>"), std::string::npos);
  EXPECT_NE(page.find("T = 5, unstable</span>"), std::string::npos) << "its steps";
  EXPECT_EQ(page.find("of the floor at best"), std::string::npos);
}

TEST_F(ReportChoice, WrongRowsAreInTheTableAlone) {
  Json wrong = measured();
  wrong["rel_l2"] = 0.5;
  const std::string page = page_of({wrong});
  EXPECT_NE(page.find("1 of 1 rows: the timed call was outside the tolerance"), std::string::npos);
  EXPECT_EQ(count_of(page, "badge wrong"), 2u);
  EXPECT_EQ(page.find("Roofline</h2>"), std::string::npos);
  EXPECT_EQ(page.find("Efficiency</h2>"), std::string::npos);
  EXPECT_NE(page.find("Every row</h2>"), std::string::npos);
  wrong["rel_l2"] = nullptr;  // infinitely far
  EXPECT_EQ(count_of(page_of({wrong}), "badge wrong"), 2u);
  EXPECT_NE(table().find(" (WRONG) |"), std::string::npos);
}

TEST_F(ReportChoice, TheNewestOfACallIsShownAndThePageSaysSo) {
  Json old = measured();
  old["date"] = "2026-11-30T10:00:00Z";
  old["median_us"] = 123000;
  Json newest = old;
  newest["date"] = "2026-11-30T11:00:00Z";
  newest["median_us"] = 77000;
  const std::string page = page_of({newest, old});
  EXPECT_EQ(page.find("123 ms"), std::string::npos);
  EXPECT_NE(page.find("77.0 ms"), std::string::npos);
  EXPECT_NE(page.find("that of 2026-11-30T11:00:00Z counts, not 2026-11-30T10:00:00Z"),
            std::string::npos);
  EXPECT_NE(table().find("\nMeasured again: 64,32,8,2"), std::string::npos);
}

/// On a GPU the products read the weights of all experts: there they are a bar at any T.
TEST_F(ReportChoice, DenseProductsOfGpusAreAlwaysABar) {
  Json row = measured();
  row["floor_us"] = 100.0;
  row["bound_us"] = 99.0;
  EXPECT_EQ(page_of({row}).find("<span>dense GEMM</span>"), std::string::npos);
  row["backend"] = "cuda";
  EXPECT_NE(page_of({row}).find("<span>dense GEMM</span>"), std::string::npos);
}

TEST_F(ReportChoice, ThousandsOfRowsFitInTwoMegabytes) {
  std::vector<Json> rows(4000, measured());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i]["shape"] = "shape " + std::to_string(i / 64) + std::string(40, 'x');
    rows[i]["tokens"] = i % 64 + 1;
    rows[i]["command"] = "distmoe bench " + std::to_string(i) + std::string(200, 'y');
    rows[i]["missing"] = {"reason " + std::to_string(i)};
    rows[i]["machine"] = i % 3 == 0 ? "one" : i % 3 == 1 ? "two" : "three";
  }
  const std::string page = page_of(rows);
  EXPECT_LT(page.size(), 2'000'000u);
  EXPECT_GT(page.size(), 500'000u);
  for (const char* what : {"rows", "cards", "commands", "reasons"}) {
    EXPECT_NE(page.find(std::string(" more ") + what + " are left out"), std::string::npos) << what;
  }
  EXPECT_NE(page.find("</html>"), std::string::npos);
}

}  // namespace
}  // namespace distmoe::tools
