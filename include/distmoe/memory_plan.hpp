// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "distmoe/config.hpp"
#include "distmoe/export.hpp"

namespace distmoe {

enum class BackendKind { kCpu, kCuda };

/// What a plan depends on besides the configuration and the number of ranks.
struct PlanTarget {
  BackendKind backend = BackendKind::kCpu;
  /// Worker threads of one rank on the CPU: each has its own workspace. CUDA plans do not depend on
  /// it.
  int num_threads = 1;
  bool operator==(const PlanTarget&) const = default;
};

/// One named buffer of a context.
struct PlanBuffer {
  std::string name;
  std::int64_t bytes = 0;  ///< a multiple of 128
  bool operator==(const PlanBuffer&) const = default;
};

/// What one rank allocates, exactly. All sizes in bytes unless they say rows. The arithmetic is in
/// docs/memory-plan.md.
struct MemoryPlan {
  PlanTarget target;                     ///< what it was made for; CUDA with num_threads 1
  std::int64_t balanced_rows = 0;        ///< T*K
  std::int64_t device_scratch_rows = 0;  ///< rows that fit in device scratch, padding included
  std::int64_t total_scratch_rows = 0;   ///< the same with host scratch
  double device_scratch_factor = 0.0;    ///< after the cap at P
  double total_scratch_factor = 0.0;
  std::int64_t saved_input_bytes_per_layer = 0;
  std::int64_t saved_bytes_per_layer_balanced = 0;  ///< of a saving forward at balanced routing
  std::int64_t device_scratch_bytes = 0;
  std::int64_t host_scratch_bytes = 0;
  std::int64_t minimum_slot_bytes = 0;     ///< everything is recomputed
  std::int64_t balanced_slot_bytes = 0;    ///< balanced routing saves everything
  std::int64_t max_useful_slot_bytes = 0;  ///< no routing within the plan needs more
  std::int64_t slot_bytes = 0;             ///< selected
  std::int64_t num_slots = 0;
  std::int64_t total_activation_bytes = 0;  ///< num_slots * slot_bytes
  std::int64_t total_device_bytes = 0;      ///< slots and device scratch
  std::int64_t total_virtual_bytes = 0;     ///< and host scratch
  std::vector<PlanBuffer> communication_buffers;
  std::vector<PlanBuffer> metadata_buffers;
  std::vector<PlanBuffer> control_buffers;
  std::vector<PlanBuffer> workspace_buffers;
  std::int64_t communication_bytes = 0;
  std::int64_t metadata_bytes = 0;
  std::int64_t control_bytes = 0;
  std::int64_t workspace_bytes = 0;
  std::int64_t allocated_bytes = 0;  ///< the sum of all; what the context allocates

  bool operator==(const MemoryPlan&) const = default;
};

/// Where the memory of a rank on a GPU with host scratch physically is: all but the communication
/// buffers in one range of addresses [slots | host scratch | device scratch | metadata, control and
/// workspace], in bytes that are multiples of the granularity. Pages that a section shares with its
/// neighbour are the device's.
struct PhysicalSections {
  std::int64_t granularity_bytes = 0;
  std::int64_t device_prefix_bytes = 0;  ///< slots
  std::int64_t host_bytes = 0;           ///< 0 where host scratch fills no piece of its own
  std::int64_t device_hot_bytes = 0;     ///< device scratch and what follows
  std::int64_t padding_bytes = 0;        ///< of all that is no memory of the plan
  bool operator==(const PhysicalSections&) const = default;
};

/// Of a device whose memory comes in pieces of `granularity_bytes` (NVIDIA's in 2 MiB). Pure.
/// Throws invalid_argument for a granularity < 1.
DISTMOE_EXPORT PhysicalSections physical_sections(const MemoryPlan& plan,
                                                  std::int64_t granularity_bytes);

/// What calls of a context took of its activation buffer, at most, on this rank. Scratch counts as
/// it is placed for the rows of a call, with the regions that a backward would use.
struct RegionPeaks {
  std::vector<std::int64_t> slot_bytes;  ///< of every slot
  std::int64_t device_scratch_bytes = 0;
  std::int64_t host_scratch_bytes = 0;
};

/// Sizes everything that a context of `config` on one of `ep_size` ranks allocates. Pure: allocates
/// no buffer, asks no device. Throws invalid_argument as `validate` does, for ep_size < 1, an
/// unknown backend and sizes beyond 64 bits.
DISTMOE_EXPORT MemoryPlan plan_memory(const Config& config, int ep_size,
                                      const PlanTarget& target = {});

/// A text for people: every region in exact bytes and human units, what happens past its limit,
/// what the selected slot saves at balanced routing, and warnings. `plan` is plan_memory's of
/// `config`.
DISTMOE_EXPORT std::string explain(const Config& config, const MemoryPlan& plan);

/// Whether a plan fits a budget of bytes a rank, and what would. Each suggestion changes one value
/// and keeps the others; none where no legal value fits.
struct BudgetReport {
  bool fits = false;
  std::int64_t budget_bytes = 0;
  std::int64_t needed_bytes = 0;  ///< allocated_bytes; for CUDA without host scratch
  std::optional<std::int64_t> largest_max_tokens;
  std::optional<std::int64_t> largest_num_slots;  ///< none for inference
  /// Of the device scratch; of all scratch where `factor_is_total`. At most the number of ranks: a
  /// larger factor plans no more rows. None where no factor that plans a row fits, unless the plan,
  /// whose factor plans none, does.
  std::optional<double> largest_scratch_factor;
  bool factor_is_total = false;  ///< the budget counts host scratch too (CPU with host_scratch)
};

/// Throws as plan_memory does, and invalid_argument for a negative budget. A plan that does not fit
/// is no error.
DISTMOE_EXPORT BudgetReport check_budget(const Config& config, int ep_size,
                                         std::int64_t budget_bytes, const PlanTarget& target = {});

/// The report in words, one fact a line.
DISTMOE_EXPORT std::string explain(const BudgetReport& report);

}  // namespace distmoe
