// SPDX-License-Identifier: Apache-2.0
//
// What this build has and whether it can run here: facts that `distmoe info` lists and `distmoe
// doctor` judges.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "machine.hpp"

namespace distmoe::tools {

/// A backend or an engine.
struct Component {
  std::string name;
  bool is_compiled = false;
  bool runs_here = false;
  std::string detail;  ///< how it runs, or why it does not
};

/// cpu, cuda.
std::vector<Component> backends();
/// threads, mpi, tcp, nccl. Whether there are GPUs for nccl is what backends() says.
std::vector<Component> engines();

nlohmann::ordered_json json_of(const std::vector<Component>& components);
nlohmann::ordered_json json_of(const Machine& machine);

}  // namespace distmoe::tools
