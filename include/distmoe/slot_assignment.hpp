// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "distmoe/export.hpp"

namespace distmoe {

/// One step of a pipeline rank. A backward is either kBackward or, split, kBackwardInput and later
/// kBackwardWeight; activations live until kBackward or kBackwardWeight.
enum class PipelineActionKind : std::uint8_t {
  kForward,
  kBackward,
  kBackwardInput,
  kBackwardWeight,
};

struct PipelineAction {
  PipelineActionKind kind = PipelineActionKind::kForward;
  std::int64_t stage = 0;
  std::int64_t microbatch = 0;
  bool operator==(const PipelineAction&) const = default;
};

/// A pipeline stage of this rank. One without MoE layers needs no slot.
struct PipelineStage {
  std::int64_t stage = 0;
  std::int64_t num_moe_layers = 0;
};

/// What shares a slot: all of this rank's stages of a microbatch, or one stage of one microbatch.
/// kAuto takes the one with fewer bytes (slots times layers a slot), of equal ones kMicrobatch.
enum class SlotGrouping { kAuto, kMicrobatch, kStageMicrobatch };

/// The slot of one stage of one microbatch.
struct SlotUse {
  std::int64_t stage = 0;
  std::int64_t microbatch = 0;
  std::int64_t slot = 0;            ///< -1 for a stage without MoE layers
  std::int64_t num_moe_layers = 0;  ///< depth to select the slot with, before the forward
  bool operator==(const SlotUse&) const = default;
};

struct SlotAssignment {
  SlotGrouping grouping = SlotGrouping::kStageMicrobatch;  ///< as chosen; never kAuto
  std::int64_t num_activation_slots = 0;                   ///< the peak number of live groups
  std::int64_t max_moe_layers_per_activation_slot = 0;     ///< of the deepest slot
  std::vector<SlotUse> uses;                               ///< in the order of the forwards

  /// The use of a stage and microbatch of the schedule. Throws invalid_argument for any other.
  DISTMOE_EXPORT const SlotUse& use_of(std::int64_t stage, std::int64_t microbatch) const;
  bool operator==(const SlotAssignment&) const = default;
};

/// Assigns activation slots to the finalized schedule of one pipeline rank, in execution order:
/// each group takes the lowest free slot at its first forward and frees it after its last backward,
/// so that the number of slots is the peak liveness. The two numbers of the result belong into
/// Config, unless no stage has MoE layers: then both are 0, which Config refuses, and the rank
/// needs no context.
///
/// Throws invalid_argument for a `grouping` that is none of its enumeration and where slots times
/// layers leave 64 bits (with kAuto: in both groupings); and, naming the action and its position,
/// for a stage that is not in `stages`, a microbatch outside [0, num_microbatches), an action that
/// comes twice, before the one it needs or in both forms of a backward, and for a stage and
/// microbatch without forward or backward. With kMicrobatch also for a backward that a slot, which
/// is a stack, cannot serve: one that ends before that of a later forward of its microbatch; kAuto
/// then takes kStageMicrobatch.
DISTMOE_EXPORT SlotAssignment assign_activation_slots(std::span<const PipelineAction> actions,
                                                      std::span<const PipelineStage> stages,
                                                      std::int64_t num_microbatches,
                                                      SlotGrouping grouping = SlotGrouping::kAuto);

}  // namespace distmoe
