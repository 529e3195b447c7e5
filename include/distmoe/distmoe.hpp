// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "distmoe/communicator.hpp"
#include "distmoe/config.hpp"
#include "distmoe/context.hpp"
#include "distmoe/dlpack.hpp"
#include "distmoe/error.hpp"
#include "distmoe/log.hpp"
#include "distmoe/memory_plan.hpp"
#include "distmoe/prepared_weight.hpp"
#include "distmoe/quantise.hpp"
#include "distmoe/refusal.hpp"
#include "distmoe/routed_experts.hpp"
#include "distmoe/routed_experts_backward.hpp"
#include "distmoe/saved_forward.hpp"
#include "distmoe/slot_assignment.hpp"
#include "distmoe/tensor.hpp"
#include "distmoe/version.hpp"
