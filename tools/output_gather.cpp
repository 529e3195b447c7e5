// SPDX-License-Identifier: Apache-2.0
#include "output_gather.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>

#include "core/check.hpp"
#include "output_error.hpp"

namespace distmoe::tools {
namespace {

/// Bytes that travel at a time, which bounds what the first rank holds.
constexpr std::int64_t kPieceBytes = 1 << 20;
constexpr std::int64_t kBF16Bytes = 2;

}  // namespace

void OutputGather::run(RankGroup& group, const std::filesystem::path& path,
                       const std::vector<std::int64_t>& tokens_per_rank, std::int64_t hidden_dim,
                       std::span<const std::span<const std::byte>> own) {
  if (group.is_first()) {
    const std::int64_t num_tokens =
        std::accumulate(tokens_per_rank.begin(), tokens_per_rank.end(), std::int64_t{0});
    std::vector<TensorEntry> entries;
    for (std::size_t i = 0; i < own.size(); ++i) {
      const std::string name = i == 0 ? "y" : concat("y", i + 1);
      entries.push_back({name, DType::kBF16, {num_tokens, hidden_dim}});
    }
    write([&] { file_ = std::make_unique<SafetensorsWriter>(path, entries); });
  }
  for (const std::span<const std::byte> y : own) gather(group, tokens_per_rank, hidden_dim, y);
}

void OutputGather::gather(RankGroup& group, const std::vector<std::int64_t>& tokens_per_rank,
                          std::int64_t hidden_dim, std::span<const std::byte> own) {
  if (group.is_first()) write([&] { file_->append(own); });
  std::vector<std::byte> received;
  for (int source = 1; source < group.size(); ++source) {
    const std::int64_t num_bytes =
        tokens_per_rank[static_cast<std::size_t>(source)] * hidden_dim * kBF16Bytes;
    for (std::int64_t begin = 0; begin < num_bytes; begin += kPieceBytes) {
      const auto length = static_cast<std::size_t>(std::min(kPieceBytes, num_bytes - begin));
      std::span<const std::byte> sent;
      if (group.rank() == source) sent = own.subspan(static_cast<std::size_t>(begin), length);
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
