// SPDX-License-Identifier: Apache-2.0
// Invariant: `distmoe report` makes of results one small page that has every row, every section for
// which there is something, and nothing from elsewhere; a table has the same figures.
#include <gtest/gtest.h>

#include <fstream>
#include <regex>
#include <sstream>

#include "command_testing.hpp"

namespace distmoe::tools {
namespace {

class ReportCommand : public CommandTest {
 protected:
  /// Results of two numbers of ranks and of tokens.
  std::string results(const Words& more = {}) {
    std::string lines;
    for (const char* ranks : {"1", "2"}) {
      Words words{"env",          "CUDA_VISIBLE_DEVICES=",
                  command_path(), "bench",
                  "--rounds",     "2",
                  "--shape",      "64,32,8,2",
                  "--tokens",     "5",
                  "40",           "--ranks",
                  ranks,          "--steps",
                  "--json"};
      words.insert(words.end(), more.begin(), more.end());
      const CommandResult result = run_words(words);
      EXPECT_EQ(result.exit_code, 0) << result.error;
      lines += result.output;
    }
    const std::string path = file("results");
    std::ofstream(path) << lines;
    return path;
  }
  CommandResult report(const Words& more) {
    Words words{command_path(), "report"};
    words.insert(words.end(), more.begin(), more.end());
    return run_words(words);
  }
};

TEST_F(ReportCommand, MakesOnePageWithEverySection) {
  const CommandResult result = report({results(), "-o", file("page")});
  ASSERT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.output, "");
  const std::string page = read_file(file("page"));
  EXPECT_LT(page.size(), 2000000U);
  for (const char* part :
       {"<!DOCTYPE html>", "prefers-color-scheme:dark", "name=\"viewport\"", "Every row</h2>",
        "Efficiency</h2>", "Roofline</h2>", "Where the time goes</h2>", "Scaling over tokens</h2>",
        "Scaling over ranks</h2>", "Memory plan</h2>", "How it was measured</h2>",
        "dispatch_w13_swiglu", "distmoe bench --shape 64,32,8,2 --tokens 5 40 --ranks 2 --steps"}) {
    EXPECT_NE(page.find(part), std::string::npos) << part;
  }
  const std::regex row("<tr><td>64,32,8,2</td>");
  EXPECT_EQ(std::distance(std::sregex_iterator(page.begin(), page.end(), row), {}), 4);
  EXPECT_FALSE(std::regex_search(page, std::regex("<script|@import|url\\(|src=")));
}

/// With the results of two GPUs made of those of two ranks on the CPU.
TEST_F(ReportCommand, ProjectsEightGpusFromTwoAndSaysSo) {
  std::string lines;
  std::istringstream text(read_file(results()));
  for (std::string line; std::getline(text, line);) {
    auto row = nlohmann::ordered_json::parse(line);
    row["backend"] = "cuda";
    row["flops"] = 1e15;
    row["bound_us"] = row["median_us"];
    if (row["ranks"] == 2) row["link_gb_s"] = 337.0;
    lines += row.dump() + '\n';
  }
  std::ofstream(file("results"), std::ios::trunc) << lines;
  const CommandResult result = report({file("results"), "-o", file("page"), "--markdown"});
  ASSERT_EQ(result.exit_code, 0) << result.error;
  EXPECT_NE(read_file(file("page")).find("projection, not a measurement</span></h2>"),
            std::string::npos);
  EXPECT_NE(result.output.find("\nProjected, not measured, for 8 GPUs:\n"), std::string::npos)
      << result.output;
}

TEST_F(ReportCommand, AFolderIsNoDestination) {
  const CommandResult result = report({results(), "-o", folder_});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.error.find("which is a folder; legal: a file, such as"), std::string::npos)
      << result.error;
}

TEST_F(ReportCommand, LeavesOutWhatNobodyMeasured) {
  const CommandResult bench =
      run_words({"env", "CUDA_VISIBLE_DEVICES=", command_path(), "bench", "--rounds", "1",
                 "--shape", "64,32,8,2", "--tokens", "5", "--mode", "dispatch", "--json"});
  std::ofstream(file("results")) << bench.output;
  ASSERT_EQ(report({file("results"), "-o", file("page")}).exit_code, 0);
  const std::string page = read_file(file("page"));
  EXPECT_NE(page.find("Every row</h2>"), std::string::npos);
  for (const char* part :
       {"Roofline</h2>", "Efficiency</h2>", "Scaling", "time goes</h2>", "8 GPUs"}) {
    EXPECT_EQ(page.find(part), std::string::npos) << part;
  }
}

TEST_F(ReportCommand, EscapesWhatResultsSay) {
  std::string text = read_file(results());
  const std::string from = "\"machine\":\"";
  for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + 1)) {
    text.insert(at + from.size(), "<script>alert(1)</script> & ");
  }
  std::ofstream(file("results"), std::ios::trunc) << text;
  ASSERT_EQ(report({file("results"), "-o", file("page")}).exit_code, 0);
  const std::string page = read_file(file("page"));
  EXPECT_EQ(page.find("<script>"), std::string::npos);
  EXPECT_NE(page.find("&lt;script&gt;alert(1)&lt;/script&gt; &amp; "), std::string::npos);
}

TEST_F(ReportCommand, PrintsATableForDocuments) {
  const CommandResult result = report({results({"--mode", "train"}), "--markdown"});
  ASSERT_EQ(result.exit_code, 0) << result.error;
  EXPECT_NE(result.output.find("| shape | call | T | P | time |"), std::string::npos);
  EXPECT_NE(result.output.find("\n| 64,32,8,2 | train | 40 | 2 | "), std::string::npos)
      << result.output;
  EXPECT_NE(result.output.find("- `distmoe bench --shape 64,32,8,2 --tokens 5 40 --mode train"),
            std::string::npos)
      << result.output;
}

TEST_F(ReportCommand, WrongArgumentsAndFilesExitWith2) {
  std::ofstream(file("results")) << "{\"shape\": \"A\"}\n";
  std::ofstream(file("empty")) << "\n";
  for (const Words& words :
       {Words{}, Words{file("results")}, Words{file("results"), "-o", file("page")},
        Words{file("empty"), "--markdown"}, Words{file("none"), "--markdown"},
        Words{file("results"), "-o", "/no/such/folder/page"},
        Words{file("results"), "-o", file("results")}}) {
    const CommandResult result = report(words);
    EXPECT_EQ(result.exit_code, 2) << result.error;
    EXPECT_EQ(result.output, "");
  }
  expect_no_output("page");
}

}  // namespace
}  // namespace distmoe::tools
