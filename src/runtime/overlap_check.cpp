// SPDX-License-Identifier: Apache-2.0
#include "runtime/overlap_check.hpp"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/check.hpp"

namespace distmoe {
namespace {

/// Bytes [begin, end).
struct Extent {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
};

bool is_apart(const Extent& a, const Extent& b) { return a.end <= b.begin || b.end <= a.begin; }

std::int64_t element_bytes(const TensorView& tensor) {
  return static_cast<std::int64_t>(size_of(tensor.dtype));
}

/// From the first to the last byte.
Extent extent_of(const TensorView& tensor) {
  std::int64_t first = 0;
  std::int64_t last = 0;
  for (int dim = 0; dim < tensor.rank; ++dim) {
    const std::int64_t reach = (tensor.shape[dim] - 1) * tensor.strides[dim];
    (reach < 0 ? first : last) += reach;
  }
  const auto data = reinterpret_cast<std::uintptr_t>(tensor.data);
  return {data + static_cast<std::uintptr_t>(first * element_bytes(tensor)),
          data + static_cast<std::uintptr_t>((last + 1) * element_bytes(tensor))};
}

/// The pieces without gaps, all of one length, in the order of memory.
std::vector<Extent> pieces_of(const TensorView& tensor) {
  std::int64_t length = 1;
  int outer = tensor.rank;  // dimensions that are not in a piece
  while (outer > 0 && (tensor.shape[outer - 1] == 1 || tensor.strides[outer - 1] == length)) {
    length *= tensor.shape[--outer];
  }
  std::vector<std::int64_t> offsets{0};
  for (int dim = 0; dim < outer; ++dim) {
    std::vector<std::int64_t> inner;
    inner.reserve(offsets.size() * static_cast<std::size_t>(tensor.shape[dim]));
    for (const std::int64_t offset : offsets) {
      for (std::int64_t i = 0; i < tensor.shape[dim]; ++i) {
        inner.push_back(offset + i * tensor.strides[dim]);
      }
    }
    offsets = std::move(inner);
  }
  std::ranges::sort(offsets);
  std::vector<Extent> pieces;
  pieces.reserve(offsets.size());
  for (const std::int64_t offset : offsets) {
    const auto begin = reinterpret_cast<std::uintptr_t>(tensor.data) +
                       static_cast<std::uintptr_t>(offset * element_bytes(tensor));
    pieces.push_back({begin, begin + static_cast<std::uintptr_t>(length * element_bytes(tensor))});
  }
  return pieces;
}

/// "[0x7f00, 0x7f40)".
std::string text_of(const Extent& extent) {
  return concat("[", reinterpret_cast<const void*>(extent.begin), ", ",  // NOLINT(*-int-to-ptr)
                reinterpret_cast<const void*>(extent.end), ")");         // NOLINT(*-int-to-ptr)
}

bool have_common_memory(const TensorView& a, const TensorView& b) {
  if (a.num_elements() == 0 || b.num_elements() == 0) return false;
  if (is_apart(extent_of(a), extent_of(b))) return false;
  const std::vector<Extent> a_pieces = pieces_of(a);
  const std::vector<Extent> b_pieces = pieces_of(b);
  auto in_a = a_pieces.begin();
  auto in_b = b_pieces.begin();
  while (in_a != a_pieces.end() && in_b != b_pieces.end()) {
    if (!is_apart(*in_a, *in_b)) return true;
    if (in_a->end <= in_b->begin) {
      ++in_a;
    } else {
      ++in_b;
    }
  }
  return false;
}

}  // namespace

void check_apart(std::initializer_list<NamedTensor> tensors) {
  for (const NamedTensor& second : tensors) {
    for (const NamedTensor* first = tensors.begin(); first != &second; ++first) {
      if (first->access == Access::kRead && second.access == Access::kRead) continue;
      if (!first->tensor->is_given() || !second.tensor->is_given()) continue;
      DISTMOE_CHECK(!have_common_memory(*first->tensor, *second.tensor), kInvalidArgument,
                    first->name, " and ", second.name, " overlap in memory: bytes ",
                    text_of(extent_of(*first->tensor)), " and ",
                    text_of(extent_of(*second.tensor)));
    }
  }
}

}  // namespace distmoe
