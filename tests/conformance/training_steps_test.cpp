// SPDX-License-Identifier: Apache-2.0
//
// Invariant: two layers train: over 50 steps of SGD on a fixed batch the loss falls, and run after
// run, on every number of ranks, every loss has the same bits.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <mutex>

#include "conformance/moe_gradients.hpp"

namespace distmoe::conformance {
namespace {

constexpr int kSteps = 50;
constexpr int kNumLayers = 2;
constexpr std::int64_t kTokens = 24;
constexpr std::int64_t kHidden = 16;
constexpr std::int64_t kInner = 24;
constexpr double kRate = 0.05;

/// Two residual layers, x + MoE(x), and a fixed target. FP32 weights, as optimisers keep them, in
/// the order of the problem; the layers compute with their rounding to BF16.
class Training {
 public:
  Training(const MoeCase& moe_case, std::optional<double> slot_factor)
      : moe_case_(moe_case),
        form_{.slot_factor = slot_factor},
        counts_(even_split(kTokens, moe_case.ranks)) {
    for (std::uint64_t layer = 0; layer < kNumLayers; ++layer) {
      problems_.push_back(make_problem({.num_tokens = kTokens,
                                        .hidden_dim = kHidden,
                                        .intermediate_dim = kInner,
                                        .num_experts = 5,
                                        .top_k = 2},
                                       RoutePattern::kDistinct, 500 + layer));
      MoeProblem& problem = problems_.back();
      for (float& score : problem.scores) score = 0.5F * std::abs(score);
      for (auto* matrix : {&problem.gate, &problem.up, &problem.down}) {
        std::vector<float> master;
        master.reserve(matrix->size());
        for (const BF16 value : *matrix) master.push_back(0.5F * to_float(value));
        masters_.push_back(std::move(master));
      }
    }
    input_ = problems_[0].x;
    target_.reserve(input_.size());
    for (std::int64_t i = 0; i < kTokens * kHidden; ++i) {
      target_.push_back(static_cast<float>(uniform(510, static_cast<std::uint64_t>(i))));
    }
  }

  std::vector<double> losses() {
    std::vector<double> losses;
    losses.reserve(kSteps);
    for (int step = 0; step < kSteps; ++step) losses.push_back(run_step());
    return losses;
  }

 private:
  void round_weights() {
    std::size_t next = 0;
    for (MoeProblem& problem : problems_) {
      for (auto* matrix : {&problem.gate, &problem.up, &problem.down}) {
        const std::vector<float>& master = masters_[next++];
        for (std::size_t i = 0; i < master.size(); ++i) (*matrix)[i] = to_bf16(master[i]);
      }
    }
  }

  /// a + b, rounded.
  static std::vector<BF16> sum(const std::vector<BF16>& a, const std::vector<BF16>& b) {
    std::vector<BF16> out;
    out.reserve(a.size());
    for (std::size_t i = 0; i < a.size(); ++i)
      out.push_back(to_bf16(to_float(a[i]) + to_float(b[i])));
    return out;
  }

  /// dy of the mean squared error, and the error.
  std::vector<BF16> loss_gradient(const std::vector<BF16>& y, double& loss) const {
    std::vector<BF16> dy;
    dy.reserve(y.size());
    for (std::size_t i = 0; i < y.size(); ++i) {
      const double difference = to_float(y[i]) - target_[i];
      loss += difference * difference / static_cast<double>(y.size());
      dy.push_back(to_bf16(2.0 * difference / static_cast<double>(kTokens)));
    }
    return dy;
  }

  std::vector<BF16> forward(const std::shared_ptr<Communicator>& communicator, Context& context,
                            MoeProblem& problem, const std::vector<BF16>& x,
                            std::vector<SavedForward>& saved) {
    MoeProblem layer = problem;
    layer.x = x;
    const RankCall call = pack_rank(layer, {}, counts_, communicator->rank());
    saved.push_back(saving_routed_experts(context, call.input, call.weights, call.y_view()));
    return sum(x, gather_rows(*communicator, call.y_rows(), counts_, kHidden));
  }

  double run_step() {
    round_weights();
    std::vector<GradientValues> gradients(kNumLayers, GradientValues(problems_[0]));
    double loss = 0;
    std::mutex mutex;
    run_group(moe_case_, [&](const std::shared_ptr<Communicator>& communicator) {
      Config config = training_config(problems_[0], moe_case_, form_, kTokens);
      config.max_moe_layers_per_activation_slot = kNumLayers;
      Context context = make_context(config, moe_case_, communicator);
      std::vector<SavedForward> saved;
      std::vector<BF16> x = input_;
      for (MoeProblem& problem : problems_) {
        x = forward(communicator, context, problem, x, saved);
      }
      double my_loss = 0;
      std::vector<BF16> dy = loss_gradient(x, my_loss);
      for (std::size_t layer = kNumLayers; layer-- > 0;) {
        const RankGradients mine(problems_[layer], dy, form_, counts_, communicator->rank());
        const RankCall call = pack_rank(problems_[layer], {}, counts_, communicator->rank());
        routed_experts_backward(context, std::move(saved[layer]), mine.dy(), call.weights,
                                mine.destinations());
        GradientValues part(problems_[layer]);
        mine.copy_to(part);
        dy = sum(dy, gather_rows(*communicator, own_rows(part.x, communicator->rank()), counts_,
                                 kHidden));
        const std::scoped_lock lock(mutex);
        mine.copy_to(gradients[layer]);
        loss = my_loss;
      }
    });
    update(gradients);
    return loss;
  }

  std::vector<BF16> own_rows(const std::vector<float>& all, int rank) const {
    std::size_t first = 0;
    for (int before = 0; before < rank; ++before) {
      first += static_cast<std::size_t>(counts_[static_cast<std::size_t>(before)] * kHidden);
    }
    std::vector<BF16> rows;
    const std::int64_t size = counts_[static_cast<std::size_t>(rank)] * kHidden;
    rows.reserve(static_cast<std::size_t>(size));
    for (std::int64_t i = 0; i < size; ++i) {
      rows.push_back(to_bf16(all[first + static_cast<std::size_t>(i)]));
    }
    return rows;
  }

  void update(const std::vector<GradientValues>& gradients) {
    std::size_t next = 0;
    for (const GradientValues& layer : gradients) {
      for (const auto* gradient : {&layer.gate, &layer.up, &layer.down}) {
        std::vector<float>& master = masters_[next++];
        for (std::size_t i = 0; i < master.size(); ++i) {
          master[i] -= static_cast<float>(kRate) * (*gradient)[i];
        }
      }
    }
  }

  MoeCase moe_case_;
  BackwardForm form_;
  TokenCounts counts_;
  std::vector<MoeProblem> problems_;
  std::vector<std::vector<float>> masters_;
  std::vector<BF16> input_;
  std::vector<float> target_;
};

TEST(TrainingSteps, LowerTheLossWithTheSameBitsEverywhere) {
  const std::vector<double> losses = Training({}, std::nullopt).losses();
  EXPECT_LT(losses.back(), 0.6 * losses.front());
  for (const double loss : losses) EXPECT_TRUE(std::isfinite(loss));
  // In the long run every ten steps lower it.
  for (std::size_t step = 10; step < losses.size(); step += 10) {
    EXPECT_LT(losses[step], losses[step - 10]) << step;
  }
  EXPECT_EQ(losses, Training({}, std::nullopt).losses());
  EXPECT_EQ(losses, Training({.ranks = 1, .num_threads = 2}, 1.0).losses());
  EXPECT_EQ(losses, Training({.ranks = 3, .num_threads = 1}, 3.0).losses());
}

}  // namespace
}  // namespace distmoe::conformance
