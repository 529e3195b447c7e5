// SPDX-License-Identifier: Apache-2.0
//
// Invariant: `distmoe plan` prints the plan of the library, as text or as one JSON object, writes
// the drawing only when it is complete, and exits 2 with a reason for what it cannot plan.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "command_testing.hpp"

namespace distmoe::tools {
namespace {

class PlanCommand : public CommandTest {
 protected:
  CommandResult plan(const Words& more) {
    Words words = {command_path(), "plan"};
    words.insert(words.end(), more.begin(), more.end());
    return run_words(words);
  }
};

const Words kCheckValue = {"--tokens", "4096", "--top-k",         "8",     "--ep",           "16",
                           "--hidden", "4096", "--intermediate",  "14336", "--experts",      "128",
                           "--layers", "32",   "--device-factor", "1.5",   "--total-factor", "16"};

Words check_value_and(const Words& more) {
  Words words = kCheckValue;
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

TEST_F(PlanCommand, JsonHasTheNumbersOfThePlan) {
  const CommandResult result = plan(check_value_and({"--json"}));
  EXPECT_EQ(result.exit_code, 0) << result.error;
  const nlohmann::json json = result.json();
  EXPECT_EQ(json["device_scratch_bytes"], 7449083904);
  EXPECT_EQ(json["host_scratch_bytes"], 72007811072);
  EXPECT_EQ(json["minimum_slot_bytes"], 1073741824);
  EXPECT_EQ(json["balanced_slot_bytes"], 77309411328);
  for (const char* key : {"balanced_rows",          "device_scratch_rows",
                          "total_scratch_rows",     "device_scratch_factor",
                          "total_scratch_factor",   "saved_input_bytes_per_layer",
                          "device_scratch_bytes",   "host_scratch_bytes",
                          "minimum_slot_bytes",     "balanced_slot_bytes",
                          "max_useful_slot_bytes",  "slot_bytes",
                          "total_activation_bytes", "total_device_bytes",
                          "total_virtual_bytes",    "num_slots",
                          "communication_bytes",    "metadata_bytes",
                          "control_bytes",          "workspace_bytes",
                          "allocated_bytes"}) {
    EXPECT_TRUE(json.contains(key) && json[key].is_number()) << key;
  }
  for (const char* section : {"communication", "metadata", "control", "workspace"}) {
    std::int64_t sum = 0;
    for (const auto& buffer : json[std::string(section) + "_buffers"]) {
      sum += buffer["bytes"].get<std::int64_t>();
    }
    EXPECT_EQ(json[std::string(section) + "_bytes"], sum);
  }
  EXPECT_FALSE(json.contains("budget"));
}

TEST_F(PlanCommand, ABudgetThatIsTooSmallIsAValue) {
  const CommandResult result = plan(check_value_and({"--json", "--budget", "40GiB"}));
  EXPECT_EQ(result.exit_code, 0) << result.error;
  const nlohmann::json budget = result.json()["budget"];
  EXPECT_EQ(budget["fits"], false);
  EXPECT_EQ(budget["budget_bytes"], std::int64_t{40} << 30);
  EXPECT_GT(budget["largest_max_tokens"], 1000);
  EXPECT_EQ(budget["largest_num_slots"], nullptr);
  EXPECT_LT(budget["largest_scratch_factor"], 16.0);
  const CommandResult text = plan(check_value_and({"--budget", "40GiB"}));
  EXPECT_NE(text.output.find("does not fit"), std::string::npos);
}

TEST_F(PlanCommand, TextNamesModelAndRegions) {
  const CommandResult result = plan({"--model", "Mixtral-8x7B", "--tokens", "128", "--ep", "2"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  for (const char* part : {"Mixtral-8x7B, P=2", "activation slots: 1 slot(s)",
                           "device scratch:", "host overflow scratch:", "allocated"}) {
    EXPECT_NE(result.output.find(part), std::string::npos) << part;
  }
  EXPECT_TRUE(result.error.empty()) << result.error;
}

TEST_F(PlanCommand, ReadsTheShapeOfACheckpoint) {
  const auto folder = checkpoint_folder("gptoss");
  if (folder.empty()) GTEST_SKIP() << "checkpoint gptoss is not here";
  // config.json alone is enough.
  std::filesystem::copy_file(folder / "config.json", file("config.json"));
  const CommandResult result =
      plan({"--checkpoint", folder_.string(), "--tokens", "10", "--inference", "--json"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.json()["balanced_rows"], 40);
  EXPECT_EQ(result.json()["saved_input_bytes_per_layer"], 10 * 192 * 2);
  const CommandResult missing = plan({"--checkpoint", file("none").string(), "--tokens", "10"});
  EXPECT_EQ(missing.exit_code, 2);
  EXPECT_NE(missing.error.find("config.json"), std::string::npos) << missing.error;
}

TEST_F(PlanCommand, WritesTheDrawing) {
  const CommandResult result =
      plan(check_value_and({"--svg", file("plan.svg").string(), "--json"}));
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(read_file(file("plan.svg")).rfind("<svg ", 0), 0u);
  const CommandResult nowhere = plan(check_value_and({"--svg", file("no/plan.svg").string()}));
  EXPECT_EQ(nowhere.exit_code, 2);
  EXPECT_NE(nowhere.error.find("plan.svg"), std::string::npos) << nowhere.error;
  EXPECT_TRUE(nowhere.output.empty());
  EXPECT_EQ(plan(check_value_and({"--svg", folder_.string()})).exit_code, 2);
}

// A limit of the file size stands for a full disk.
TEST_F(PlanCommand, FailsWhereTheDrawingDoesNotFitAndLeavesNothing) {
  std::ofstream(file("plan.svg")) << "old";
  const CommandResult result =
      run_words({"bash", "-c",
                 "ulimit -f 1; '" + command_path() + "' plan --model DeepSeek-V3 " +
                     "--tokens 4096 --svg '" + file("plan.svg").string() + "'"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.error.find("plan.svg"), std::string::npos) << result.error;
  EXPECT_NE(result.error.find("File too large"), std::string::npos) << result.error;
  EXPECT_EQ(result.output, "");
  EXPECT_EQ(read_file(file("plan.svg")), "old");
  std::filesystem::remove(file("plan.svg"));
  expect_no_output("plan.svg");
}

TEST_F(PlanCommand, DrawsThroughALinkAndNeverOverTheCheckpoint) {
  const auto folder = checkpoint_folder("gptoss");
  if (folder.empty()) GTEST_SKIP() << "checkpoint gptoss is not here";
  std::filesystem::copy_file(folder / "config.json", file("config.json"));
  const std::string config = read_file(file("config.json"));
  std::filesystem::create_symlink("plan.svg", file("link"));
  std::filesystem::create_symlink("config.json", file("to-config"));
  const auto draw = [&](const std::string& name) {
    return plan({"--checkpoint", folder_.string(), "--tokens", "10", "--svg", file(name).string()});
  };
  EXPECT_EQ(draw("link").exit_code, 0);
  EXPECT_TRUE(std::filesystem::is_symlink(file("link")));
  EXPECT_EQ(read_file(file("plan.svg")).rfind("<svg ", 0), 0u);
  for (const std::string name : {"config.json", "to-config", "model.safetensors"}) {
    const CommandResult result = draw(name);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_NE(result.error.find(file(name).string()), std::string::npos) << result.error;
  }
  EXPECT_EQ(read_file(file("config.json")), config);
}

TEST_F(PlanCommand, RefusesWhatTheLibraryRefuses) {
  const CommandResult overlap = plan(check_value_and({"--top-k", "300"}));
  EXPECT_EQ(overlap.exit_code, 2);
  const CommandResult slot = plan(check_value_and({"--slot-bytes", "5"}));
  EXPECT_EQ(slot.exit_code, 2);
  EXPECT_NE(slot.error.find("minimum required 1073741824"), std::string::npos) << slot.error;
  const CommandResult huge = plan({"--tokens", "2147483647", "--hidden", "4611686018427387904",
                                   "--intermediate", "8", "--top-k", "1", "--experts", "1"});
  EXPECT_EQ(huge.exit_code, 2);
  EXPECT_NE(huge.error.find("64 bits"), std::string::npos) << huge.error;
  EXPECT_TRUE(huge.output.empty());
}

TEST_F(PlanCommand, SizesTheBackendThatItIsAskedForAndSaysWhich) {
  const CommandResult cpu = plan(check_value_and({"--json"}));
  const CommandResult cuda = plan(check_value_and({"--json", "--backend", "cuda"}));
  EXPECT_EQ(cuda.exit_code, 0) << cuda.error;
  EXPECT_EQ(cpu.output.rfind("{\n  \"backend\": \"cpu\",", 0), 0u) << cpu.output;
  EXPECT_EQ(cuda.output.rfind("{\n  \"backend\": \"cuda\",", 0), 0u) << cuda.output;
  EXPECT_EQ(cuda.json()["communication_buffers"][0]["name"], "dispatch window");
  EXPECT_NE(cuda.json()["allocated_bytes"], cpu.json()["allocated_bytes"]);
  const CommandResult text = plan(check_value_and({"--backend", "cuda", "--combine", "per_rank"}));
  EXPECT_NE(text.output.find("memory plan of one rank: cuda, "), std::string::npos);
  EXPECT_NE(text.output.find("combine per_rank"), std::string::npos);
}

}  // namespace
}  // namespace distmoe::tools
