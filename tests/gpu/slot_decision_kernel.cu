// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the decision of an activation slot, its rewind and the places of a call's regions
// compile for a one-thread kernel as they do for the host. The compiler is the test.
#include "plan/scratch_layout.hpp"
#include "plan/slot_planner.hpp"

namespace distmoe {

struct Decision {
  SlotLimits limits;
  std::int64_t slot_layers = 0;
  std::int64_t activation_bytes = 0;
  CallRows call;
  SlotRef slot;
  std::int64_t* saved_before_P = nullptr;
  SavedLayer* layer = nullptr;
  RegionOffsets* saved = nullptr;
  RegionOffsets* scratch = nullptr;
  SlotStep* step = nullptr;
};

__global__ void decide(const __grid_constant__ Decision d) {
  *d.step = push_layer(d.limits, d.slot_layers, d.call, d.slot, d.saved_before_P, *d.layer);
  const std::int64_t tokens = d.call.tokens_P[d.limits.rank];
  const std::int64_t rows = d.call.rows_P[d.limits.rank];
  *d.saved = saved_layout(d.limits.shape, tokens, rows, d.layer->offset);
  *d.scratch = scratch_layout(d.limits.shape, rows, d.activation_bytes);
}

__global__ void rewind(const __grid_constant__ Decision d) {
  *d.step = pop_layer(d.limits, *d.layer, d.saved_before_P, d.slot);
}

__global__ void reset(const __grid_constant__ Decision d) { reset_slot(d.limits, d.slot); }

}  // namespace distmoe
