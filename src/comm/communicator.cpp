// SPDX-License-Identifier: Apache-2.0
#include "distmoe/communicator.hpp"

namespace distmoe {

SymmetricMemory::~SymmetricMemory() = default;

Communicator::~Communicator() = default;

}  // namespace distmoe
