// SPDX-License-Identifier: Apache-2.0
//
// Brings the output tokens of all ranks into the first rank's file, a piece at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "exit_code.hpp"
#include "io/safetensors_writer.hpp"
#include "rank_group.hpp"

namespace distmoe::tools {

class OutputGather {
 public:
  /// Collective. Rank r brings `own`: its tokens_per_rank[r] rows of y, BF16 [.., hidden_dim], and
  /// of y2, y3, ... where there are more outputs. The first rank writes them to a temporary file
  /// beside `path`; what it cannot write is kept as failure(), since the peers send all the same.
  void run(RankGroup& group, const std::filesystem::path& path,
           const std::vector<std::int64_t>& tokens_per_rank, std::int64_t hidden_dim,
           std::span<const std::span<const std::byte>> own);

  /// On the first rank: the file appears under its name, or failure() says why not. Nothing to do
  /// elsewhere.
  void commit();
  const Failure& failure() const noexcept { return failure_; }
  /// Removes what was not committed.
  void discard() { file_.reset(); }

 private:
  void gather(RankGroup& group, const std::vector<std::int64_t>& tokens_per_rank,
              std::int64_t hidden_dim, std::span<const std::byte> own);
  /// Runs `step` unless an earlier one failed.
  void write(const std::function<void()>& step);

  std::unique_ptr<SafetensorsWriter> file_;
  Failure failure_;
};

}  // namespace distmoe::tools
