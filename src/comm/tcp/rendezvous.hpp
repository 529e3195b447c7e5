// SPDX-License-Identifier: Apache-2.0
//
// How the ranks of a TCP group find each other. Rank 0 listens at an address that all know. Every
// other rank connects there, says who it is and where it listens itself, and gets the table of all
// ranks, or why there is no group. Then every pair connects twice: once for calls, once for control
// messages. Whatever connects and does not say the right words is dropped and otherwise ignored.
#pragma once

#include <vector>

#include "comm/tcp/socket.hpp"
#include "distmoe/communicator.hpp"

namespace distmoe::tcp {

/// The connections to one peer; those of a rank to itself stay closed.
struct Link {
  Socket calls;
  Socket control;
};

/// Collective: every pair of ranks connected. Throws peer_lost, naming who is missing, at the
/// latest after `timeout`, and peer_mismatch where ranks disagree about the group.
std::vector<Link> connect_ranks(const TcpGroup& group, std::chrono::milliseconds timeout);

}  // namespace distmoe::tcp
