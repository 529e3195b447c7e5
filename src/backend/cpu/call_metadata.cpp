// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/call_metadata.hpp"

#include "core/checked_math.hpp"
#include "layout/context_buffers.hpp"

namespace distmoe::cpu {
namespace {

/// Visits every part of two sets, with the name of its buffer.
template <typename Visit>
void for_each_part(CallMetadata& a, CallMetadata& b, const Visit& visit) {
  visit(buffer_name::kTokens, a.tokens, b.tokens);
  visit(buffer_name::kIds, a.ids, b.ids);
  visit(buffer_name::kScores, a.scores, b.scores);
  visit(buffer_name::kRowOrigin, a.routing.row_origin, b.routing.row_origin);
  visit(buffer_name::kReceivedRow, a.routing.received_row, b.routing.received_row);
  visit(buffer_name::kRowOfRoute, a.routing.row_of_route, b.routing.row_of_route);
  visit(buffer_name::kRowCounts, a.routing.counts, b.routing.counts);
  visit(buffer_name::kExpertBegin, a.routing.expert_begin, b.routing.expert_begin);
}

template <typename Element>
std::span<Element> elements_of(std::span<std::byte> bytes) {
  return {reinterpret_cast<Element*>(bytes.data()), bytes.size() / sizeof(Element)};
}

}  // namespace

MetadataSets::MetadataSets(const ContextMemory& memory) {
  for_each_part(
      forward_only_, first_saved_,
      [&]<typename Element>(const char* name, std::span<Element>& one, std::span<Element>& saved) {
        const std::span<std::byte> bytes = memory.buffer(name);
        one = elements_of<Element>(bytes);
        const std::span<std::byte> sets = memory.buffer(saved_buffer_name(name));
        saved = elements_of<Element>(sets.first(sets.empty() ? 0 : bytes.size()));
      });
}

CallMetadata MetadataSets::saved(std::int64_t index) const {
  CallMetadata first = first_saved_;
  CallMetadata set;
  // Aligned up again: a buffer need not hold a whole number of elements (a RowOrigin has 12 bytes).
  for_each_part(
      first, set,
      [&]<typename Element>(const char*, std::span<Element>& from, std::span<Element>& to) {
        const std::span<Element> one = from;
        auto* bytes = reinterpret_cast<std::byte*>(one.data());
        to = {reinterpret_cast<Element*>(bytes + index * align_up(std::ssize(std::as_bytes(one)))),
              one.size()};
      });
  return set;
}

}  // namespace distmoe::cpu
