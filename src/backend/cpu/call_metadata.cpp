// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/call_metadata.hpp"

#include "layout/context_buffers.hpp"

namespace distmoe::cpu {

CallMetadata call_metadata(const ContextMemory& memory, std::optional<std::int64_t> saved_set) {
  const auto part = [&]<typename Element>(const char* name, std::span<Element>& out) {
    std::span<std::byte> bytes = memory.buffer(name);
    if (saved_set) {
      bytes = memory.buffer(saved_buffer_name(name))
                  .subspan(static_cast<std::size_t>(*saved_set) * bytes.size(), bytes.size());
    }
    out = {reinterpret_cast<Element*>(bytes.data()), bytes.size() / sizeof(Element)};
  };
  CallMetadata set;
  part(buffer_name::kTokens, set.tokens);
  part(buffer_name::kIds, set.ids);
  part(buffer_name::kScores, set.scores);
  part(buffer_name::kRowOrigin, set.routing.row_origin);
  part(buffer_name::kReceivedRow, set.routing.received_row);
  part(buffer_name::kRowOfRoute, set.routing.row_of_route);
  part(buffer_name::kRowCounts, set.routing.counts);
  part(buffer_name::kExpertBegin, set.routing.expert_begin);
  return set;
}

}  // namespace distmoe::cpu
