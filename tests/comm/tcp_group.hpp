// SPDX-License-Identifier: Apache-2.0
//
// TCP groups whose ranks are threads of one process.
#pragma once

#include <memory>
#include <vector>

#include "distmoe/communicator.hpp"

namespace distmoe {

/// A port at which nobody listens at the moment.
int free_port();

/// What the ranks of a group on this machine agree on.
TcpGroup local_group(int rank, int size, int port);

/// One communicator a rank, made by as many threads.
std::vector<std::shared_ptr<Communicator>> make_tcp_group(int size);

}  // namespace distmoe
