// SPDX-License-Identifier: Apache-2.0
//
// One rank's part of `distmoe run --train`: dy, gradients, and the schedule of forwards and
// backwards over activation slots.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "backend/cuda/device.hpp"
#include "device_call.hpp"
#include "digest.hpp"
#include "distmoe/context.hpp"
#include "distmoe/routed_experts_backward.hpp"
#include "io/checkpoint.hpp"
#include "io/tensor_storage.hpp"
#include "output_gather.hpp"
#include "train_options.hpp"

namespace distmoe::tools {

/// The parts of all ranks, which a rank's tensors are pieces of.
struct RankParts {
  std::vector<std::int64_t> tokens;   ///< of every rank
  std::vector<std::int64_t> experts;  ///< of every rank
  int rank = 0;

  std::int64_t own_tokens() const { return tokens[static_cast<std::size_t>(rank)]; }
  std::int64_t own_experts() const { return experts[static_cast<std::size_t>(rank)]; }
};

class TrainingRun {
 public:
  /// `input` and `dy_TD` are this rank's; without a `dy_TD` it is made: see pseudo_random_dy().
  TrainingRun(const TrainOptions& options, const LayerShape& shape, const RankParts& parts,
              const RoutedInput& input, const TensorView& dy_TD);

  /// Gives dy and the gradients places where the backend wants them. Before run().
  void place(BackendKind backend, int device);
  /// Every forward and backward of one run; `call` has the tensors of a forward. Collective.
  void run(Context& context, const DeviceCall& call);
  /// Of all gradients, after run().
  Digest digest() const;
  /// Of the last run, one after the other.
  const std::vector<CallStatistics>& forwards() const { return forwards_; }
  /// Of them, those that kept their input alone.
  std::int64_t num_recomputed() const {
    return std::ranges::count(forwards_, true, &CallStatistics::is_recomputed);
  }
  /// Of this rank's rows of a forward: gate and up activations above --clip-limit, and all.
  const std::array<std::int64_t, 3>& clip_counts() const { return clip_counts_; }
  /// False where two backwards, of this run or of earlier ones, gave other gradients of x or
  /// scores.
  bool is_repeatable() const { return is_repeatable_; }
  /// dy and the gradients, in the order of the file.
  std::vector<OutputTensor> outputs() const;

 private:
  /// One tensor of a gradient, and how the ranks share it.
  struct Gradient {
    TensorEntry entry;  ///< of all ranks: the first extent is tokens or experts
    std::vector<std::int64_t> parts;
    TensorStorage storage;
    TensorView view;    ///< this rank's
    TensorView placed;  ///< where the backend reads or writes it
    std::optional<cuda::DeviceBuffer> buffer{};

    void bring() const;
    void fetch() const;
  };
  Gradient make(const char* name, DType dtype, const std::vector<std::int64_t>& parts,
                std::vector<std::int64_t> extents) const;
  void forward(Context& context, const DeviceCall& call, std::vector<SavedForward>& slot);
  void backward(Context& context, const DeviceCall& call, std::vector<SavedForward>& slot);

  TrainOptions options_;
  RankParts parts_;
  Gradient dy_;
  Gradient x_;
  Gradient scores_;
  Gradient w13_;
  Gradient w2_;
  Gradient bias13_;  ///< not given where the layer has no biases
  Gradient bias2_;
  std::vector<CallStatistics> forwards_;
  std::array<std::int64_t, 3> clip_counts_{};
  std::optional<cuda::DeviceBuffer> clip_buffer_;  ///< where a device counts
  bool has_first_ = false;
  Digest first_;  ///< of the gradients of x and scores
  bool is_repeatable_ = true;
};

/// dy of tokens [first, first + count): uniform in [-1, 1) from a hash of the element's index in
/// [T, D], rounded to BF16, so that it depends on no rank.
void pseudo_random_dy(std::int64_t first, std::int64_t count, std::int64_t hidden_dim,
                      std::span<std::byte> out);

}  // namespace distmoe::tools
