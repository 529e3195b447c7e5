// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/call_metadata.hpp"

#include <string>

#include "layout/context_buffers.hpp"

namespace distmoe::cuda {
namespace {

/// Fills what all sets have; find(name, pointer) sets the pointer.
template <typename Find>
void find_routing(CallMetadata& set, const Find& find) {
  find(buffer_name::kExpertBegin, set.expert_begin);
  find(buffer_name::kRowsPerRank, set.rows_per_rank);
  find(buffer_name::kRowsPerExpert, set.rows_per_expert);
  find(buffer_name::kRowOrigin, set.row_origin);
  find(buffer_name::kTokenRowAddress, set.token_row_address);
  find(buffer_name::kResultRowAddress, set.result_row_address);
  find(buffer_name::kGatherIndex, set.gather_index);
  find(buffer_name::kGatherSource, set.gather_source);
}

}  // namespace

CallMetadata forward_only_metadata(const DeviceMemory& memory) {
  CallMetadata set;
  find_routing(set, [&]<typename Element>(const char* name, Element*& pointer) {
    pointer = memory.buffer_of<Element>(name);
  });
  return set;
}

CallMetadata saved_metadata(const DeviceMemory& memory, std::int64_t index, std::int64_t count) {
  CallMetadata set;
  const auto find = [&]<typename Element>(const char* name, Element*& pointer) {
    pointer = memory.part_of<Element>(saved_buffer_name(name), index, count);
  };
  find_routing(set, find);
  find(buffer_name::kTokens, set.tokens);
  find(buffer_name::kIds, set.ids);
  find(buffer_name::kScores, set.scores);
  return set;
}

}  // namespace distmoe::cuda
