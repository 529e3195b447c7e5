// SPDX-License-Identifier: Apache-2.0
//
// A communicator that is written outside the library: it includes public headers alone. Each pair
// of ranks has a mailbox of messages; docs/communication.md walks through it.
#pragma once

#include <memory>
#include <vector>

#include "distmoe/communicator.hpp"

namespace distmoe {

std::vector<std::shared_ptr<Communicator>> make_mailbox_group(int size);

}  // namespace distmoe
