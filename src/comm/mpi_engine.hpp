// SPDX-License-Identifier: Apache-2.0
//
// The MPI engine is a module that is loaded when it is asked for, so that neither the library nor
// the command links MPI.
#pragma once

#include <memory>
#include <string>

#include "distmoe/communicator.hpp"

namespace distmoe {

/// Why make_mpi_communicator() would throw unsupported; empty where the module loads. Loads it, but
/// does not initialise MPI.
std::string mpi_engine_problem();

/// The one symbol of the module. Sets `communicator`, or returns false where the module belongs to
/// another version of the library than `version`.
using MpiFactory = bool (*)(const char* version, std::shared_ptr<Communicator>* communicator);
inline constexpr const char* kMpiFactorySymbol = "distmoe_make_mpi_communicator";
inline constexpr const char* kMpiModuleFile = "libdistmoe_mpi.so";

}  // namespace distmoe
