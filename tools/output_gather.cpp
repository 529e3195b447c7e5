// SPDX-License-Identifier: Apache-2.0
#include "output_gather.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>

#include "core/checked_math.hpp"
#include "output_error.hpp"

namespace distmoe::tools {
namespace {

/// Bytes that travel at a time, which bounds what the first rank holds.
constexpr std::int64_t kPieceBytes = 1 << 20;
/// Bytes of one of the first extent's members.
std::int64_t member_bytes(const TensorEntry& entry) {
  return std::accumulate(entry.shape.begin() + 1, entry.shape.end(),
                         static_cast<std::int64_t>(size_of(entry.dtype)), checked_mul);
}

}  // namespace

void OutputGather::run(RankGroup& group, const std::filesystem::path& path,
                       std::span<const OutputTensor> tensors) {
  if (group.is_first()) {
    std::vector<TensorEntry> entries;
    entries.reserve(tensors.size());
    for (const OutputTensor& tensor : tensors) entries.push_back(tensor.entry);
    write([&] { file_ = std::make_unique<SafetensorsWriter>(path, entries); });
  }
  for (const OutputTensor& tensor : tensors) gather(group, tensor);
}

void OutputGather::gather(RankGroup& group, const OutputTensor& tensor) {
  if (group.is_first()) write([&] { file_->append(tensor.own); });
  std::vector<std::byte> received;
  for (int source = 1; source < group.size(); ++source) {
    const std::int64_t num_bytes =
        tensor.parts[static_cast<std::size_t>(source)] * member_bytes(tensor.entry);
    for (std::int64_t begin = 0; begin < num_bytes; begin += kPieceBytes) {
      const auto length = static_cast<std::size_t>(std::min(kPieceBytes, num_bytes - begin));
      std::span<const std::byte> sent;
      if (group.rank() == source) {
        sent = tensor.own.subspan(static_cast<std::size_t>(begin), length);
      }
      if (group.is_first()) received.resize(length);
      group.send_to_first(source, sent, received);
      if (group.is_first()) write([&] { file_->append(received); });
    }
  }
}

void OutputGather::commit() {
  write([&] {
    if (file_) file_->commit();
  });
}

void OutputGather::write(const std::function<void()>& step) {
  if (failure_.happened()) return;
  failure_ = attempt([&] { write_output(step); });
  if (failure_.happened()) discard();
}

}  // namespace distmoe::tools
