// SPDX-License-Identifier: Apache-2.0
//
// Interval colouring of a pipeline schedule: check the schedule, then walk it once per grouping.
#include "distmoe/slot_assignment.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "core/checked_math.hpp"
#include "core/current_error.hpp"
#include "plan/option_names.hpp"

namespace distmoe {
namespace {

using Key = std::pair<std::int64_t, std::int64_t>;  // stage, microbatch
using LayersOfStage = std::map<std::int64_t, std::int64_t>;

const char* kind_name(PipelineActionKind kind) {
  switch (kind) {
    case PipelineActionKind::kForward: return "forward";
    case PipelineActionKind::kBackward: return "backward";
    case PipelineActionKind::kBackwardInput: return "backward of the input";
    case PipelineActionKind::kBackwardWeight: return "backward of the weights";
  }
  return nullptr;
}

std::string describe(std::size_t position, const PipelineAction& action) {
  const char* name = kind_name(action.kind);
  return concat("action ", position, " (", name != nullptr ? name : "unknown kind", " of stage ",
                action.stage, ", microbatch ", action.microbatch, ")");
}

bool ends_life(PipelineActionKind kind) {
  return kind == PipelineActionKind::kBackward || kind == PipelineActionKind::kBackwardWeight;
}

LayersOfStage layers_of(std::span<const PipelineStage> stages) {
  LayersOfStage layers;
  DISTMOE_CHECK(!stages.empty(), kInvalidArgument, "no stages are given; legal is 1 or more");
  for (const PipelineStage& stage : stages) {
    DISTMOE_CHECK(stage.num_moe_layers >= 0, kInvalidArgument, "stage ", stage.stage, " has ",
                  stage.num_moe_layers, " MoE layers; legal is 0 or more");
    DISTMOE_CHECK(layers.emplace(stage.stage, stage.num_moe_layers).second, kInvalidArgument,
                  "stage ", stage.stage, " is given twice");
  }
  return layers;
}

/// Follows each stage and microbatch from forward to backward.
class ScheduleCheck {
 public:
  ScheduleCheck(const LayersOfStage& layers, std::int64_t num_microbatches)
      : layers_(layers), num_microbatches_(num_microbatches) {
    DISTMOE_CHECK(num_microbatches >= 1, kInvalidArgument, "num_microbatches is ", num_microbatches,
                  "; legal is 1 or more");
  }

  void run(std::span<const PipelineAction> actions) {
    for (std::size_t i = 0; i < actions.size(); ++i) {
      check_known(i, actions[i]);
      Progress& progress = progress_[{actions[i].stage, actions[i].microbatch}];
      check_order(i, actions[i], progress);
      progress.last_position = i;
    }
    for (const auto& [stage, unused] : layers_) {
      for (std::int64_t m = 0; m < num_microbatches_; ++m) check_complete(actions, {stage, m});
    }
  }

 private:
  struct Progress {
    bool has_forward = false;
    bool has_backward = false;
    bool has_input = false;
    bool has_weight = false;
    std::size_t last_position = 0;
  };

  void check_known(std::size_t i, const PipelineAction& action) const {
    DISTMOE_CHECK(kind_name(action.kind) != nullptr, kInvalidArgument, describe(i, action),
                  ": kind ", static_cast<int>(action.kind), " is unknown");
    DISTMOE_CHECK(layers_.contains(action.stage), kInvalidArgument, describe(i, action),
                  ": the stage is not one of this rank");
    DISTMOE_CHECK(action.microbatch >= 0 && action.microbatch < num_microbatches_, kInvalidArgument,
                  describe(i, action), ": legal microbatches are 0 to ", num_microbatches_ - 1);
  }

  static void check_order(std::size_t i, const PipelineAction& action, Progress& progress) {
    const bool is_forward = action.kind == PipelineActionKind::kForward;
    DISTMOE_CHECK(is_forward || progress.has_forward, kInvalidArgument, describe(i, action),
                  ": its forward is missing before it");
    bool& seen = action.kind == PipelineActionKind::kForward         ? progress.has_forward
                 : action.kind == PipelineActionKind::kBackward      ? progress.has_backward
                 : action.kind == PipelineActionKind::kBackwardInput ? progress.has_input
                                                                     : progress.has_weight;
    DISTMOE_CHECK(!seen, kInvalidArgument, describe(i, action),
                  " is a duplicate of an earlier action");
    seen = true;
    DISTMOE_CHECK(!progress.has_backward || !(progress.has_input || progress.has_weight),
                  kInvalidArgument, describe(i, action),
                  ": the schedule has a full and a split backward for it");
    DISTMOE_CHECK(!progress.has_weight || progress.has_input, kInvalidArgument, describe(i, action),
                  ": its backward of the input is missing before it");
  }

  void check_complete(std::span<const PipelineAction> actions, const Key& key) const {
    const auto found = progress_.find(key);
    DISTMOE_CHECK(found != progress_.end(), kInvalidArgument, "stage ", key.first, ", microbatch ",
                  key.second, ": the forward is missing");
    const Progress& progress = found->second;
    if (progress.has_backward || progress.has_weight) return;
    DISTMOE_CHECK(false, kInvalidArgument,
                  describe(progress.last_position, actions[progress.last_position]), ": its ",
                  progress.has_input ? "backward of the weights" : "backward", " is missing");
  }

  const LayersOfStage& layers_;
  std::int64_t num_microbatches_;
  std::map<Key, Progress> progress_;
};

/// A slot in use: its forwards that wait for their backward, bottom to top.
struct LiveGroup {
  std::int64_t slot = 0;
  std::int64_t live_layers = 0;
  std::int64_t peak_layers = 0;
  std::vector<std::int64_t> stages;
  std::vector<std::size_t> uses;  // indices into the assignment's, of all its stages
};

/// Walks the checked schedule with one grouping.
class Colouring {
 public:
  Colouring(const LayersOfStage& layers, SlotGrouping grouping) : layers_(layers) {
    assignment_.grouping = grouping;
  }

  /// None, with the offending position, where a backward is not the last of its slot.
  std::optional<SlotAssignment> run(std::span<const PipelineAction> actions,
                                    std::size_t& offending_position) {
    for (std::size_t i = 0; i < actions.size(); ++i) {
      const PipelineAction& action = actions[i];
      if (action.kind == PipelineActionKind::kForward) {
        forward(action);
      } else if (ends_life(action.kind) && !backward(action)) {
        offending_position = i;
        return std::nullopt;
      }
    }
    return std::move(assignment_);
  }

 private:
  Key group_of(const PipelineAction& action) const {
    const bool by_microbatch = assignment_.grouping == SlotGrouping::kMicrobatch;
    return {by_microbatch ? 0 : action.stage, action.microbatch};
  }

  void forward(const PipelineAction& action) {
    const std::int64_t layers = layers_.at(action.stage);
    assignment_.uses.push_back({action.stage, action.microbatch, -1, 0});
    if (layers == 0) return;
    auto [entry, is_new] = live_.try_emplace(group_of(action));
    LiveGroup& group = entry->second;
    if (is_new) group.slot = take_lowest_free();
    group.live_layers = checked_add(group.live_layers, layers);
    group.peak_layers = std::max(group.peak_layers, group.live_layers);
    group.stages.push_back(action.stage);
    group.uses.push_back(assignment_.uses.size() - 1);
    assignment_.uses.back().slot = group.slot;
  }

  bool backward(const PipelineAction& action) {
    const std::int64_t layers = layers_.at(action.stage);
    if (layers == 0) return true;
    const auto entry = live_.find(group_of(action));
    LiveGroup& group = entry->second;
    if (group.stages.back() != action.stage) return false;
    group.stages.pop_back();
    group.live_layers -= layers;
    if (group.stages.empty()) {
      finish(group);
      live_.erase(entry);
    }
    return true;
  }

  void finish(const LiveGroup& group) {
    for (const std::size_t use : group.uses) {
      assignment_.uses[use].num_moe_layers = group.peak_layers;
    }
    assignment_.max_moe_layers_per_activation_slot =
        std::max(assignment_.max_moe_layers_per_activation_slot, group.peak_layers);
    free_.insert(group.slot);
  }

  std::int64_t take_lowest_free() {
    if (free_.empty()) return assignment_.num_activation_slots++;
    const std::int64_t slot = *free_.begin();
    free_.erase(free_.begin());
    return slot;
  }

  const LayersOfStage& layers_;
  SlotAssignment assignment_;
  std::map<Key, LiveGroup> live_;
  std::set<std::int64_t> free_;
};

/// Slots times layers; none beyond 64 bits.
std::optional<std::int64_t> layer_capacity(const SlotAssignment& assignment) {
  std::int64_t layers = 0;
  const bool is_beyond = __builtin_mul_overflow(
      assignment.num_activation_slots, assignment.max_moe_layers_per_activation_slot, &layers);
  return is_beyond ? std::nullopt : std::optional(layers);
}

std::string describe_capacity(const SlotAssignment& assignment) {
  return concat(assignment.num_activation_slots, " x ",
                assignment.max_moe_layers_per_activation_slot,
                assignment.grouping == SlotGrouping::kMicrobatch ? " by microbatch"
                                                                 : " by stage and microbatch");
}

SlotAssignment fitting(SlotAssignment assignment) {
  DISTMOE_CHECK(layer_capacity(assignment), kInvalidArgument,
                "slots x layers do not fit in 64 bits: ", describe_capacity(assignment));
  return assignment;
}

/// Of the groupings of one schedule the one that takes less. None fits where neither does.
SlotAssignment smaller(SlotAssignment by_microbatch, SlotAssignment by_stage) {
  const auto microbatch = layer_capacity(by_microbatch);
  const auto stage = layer_capacity(by_stage);
  DISTMOE_CHECK(microbatch || stage, kInvalidArgument,
                "slots x layers do not fit in 64 bits: ", describe_capacity(by_microbatch), ", ",
                describe_capacity(by_stage));
  const bool takes_microbatch = microbatch && (!stage || *microbatch <= *stage);
  return takes_microbatch ? std::move(by_microbatch) : std::move(by_stage);
}

SlotAssignment assignment_of(std::span<const PipelineAction> actions,
                             std::span<const PipelineStage> stages, std::int64_t num_microbatches,
                             SlotGrouping grouping) {
  check_choice("grouping", grouping);
  const LayersOfStage layers = layers_of(stages);
  ScheduleCheck(layers, num_microbatches).run(actions);
  std::size_t offending = 0;
  std::optional<SlotAssignment> by_microbatch;
  if (grouping != SlotGrouping::kStageMicrobatch) {
    by_microbatch = Colouring(layers, SlotGrouping::kMicrobatch).run(actions, offending);
  }
  if (grouping == SlotGrouping::kMicrobatch) {
    DISTMOE_CHECK(by_microbatch, kInvalidArgument, describe(offending, actions[offending]),
                  ": a later forward of the microbatch still waits for its backward; a slot is a "
                  "stack, group by stage and microbatch");
    return fitting(*std::move(by_microbatch));
  }
  SlotAssignment by_stage =
      *Colouring(layers, SlotGrouping::kStageMicrobatch).run(actions, offending);
  if (by_microbatch) return smaller(*std::move(by_microbatch), std::move(by_stage));
  return fitting(std::move(by_stage));
}

}  // namespace

const SlotUse& SlotAssignment::use_of(std::int64_t stage, std::int64_t microbatch) const {
  const auto found = std::ranges::find_if(
      uses, [&](const SlotUse& use) { return use.stage == stage && use.microbatch == microbatch; });
  DISTMOE_CHECK(found != uses.end(), kInvalidArgument, "stage ", stage, ", microbatch ", microbatch,
                " is not in the schedule");
  return *found;
}

SlotAssignment assign_activation_slots(std::span<const PipelineAction> actions,
                                       std::span<const PipelineStage> stages,
                                       std::int64_t num_microbatches, SlotGrouping grouping) {
  return only_errors("assigning activation slots",
                     [&] { return assignment_of(actions, stages, num_microbatches, grouping); });
}

}  // namespace distmoe
