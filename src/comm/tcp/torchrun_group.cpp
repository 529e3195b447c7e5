// SPDX-License-Identifier: Apache-2.0
#include <charconv>

#include "core/check.hpp"
#include "core/environment.hpp"
#include "distmoe/communicator.hpp"

namespace distmoe {
namespace {

int read_number(const char* name, const std::string& text, int lowest, int highest) {
  int number = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  DISTMOE_CHECK(!text.empty(), kInvalidArgument, name, " is not set; torchrun sets it");
  DISTMOE_CHECK(
      parsed.ec == std::errc() && parsed.ptr == end && number >= lowest && number <= highest,
      kInvalidArgument, name, " is '", text, "'; legal: ", lowest, "..", highest);
  return number;
}

}  // namespace

TcpGroup torchrun_group() {
  constexpr int kMaxRanks = 1 << 20;
  const LauncherEnvironment launcher = launcher_environment();
  TcpGroup group;
  group.size = read_number("WORLD_SIZE", launcher.world_size, 1, kMaxRanks);
  group.rank = read_number("RANK", launcher.rank, 0, group.size - 1);
  DISTMOE_CHECK(!launcher.master_addr.empty(), kInvalidArgument,
                "MASTER_ADDR is not set; torchrun sets it");
  group.host = launcher.master_addr;
  group.port = read_number("MASTER_PORT", launcher.master_port, 1, 65534) + 1;
  group.job = launcher.run_id;
  return group;
}

}  // namespace distmoe
