// SPDX-License-Identifier: Apache-2.0
//
// Runs forward and backward of a problem on a case and brings the gradients of all ranks together,
// in the canonical form of the problem.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "conformance/gradient_oracle.hpp"
#include "conformance/moe_runner.hpp"
#include "distmoe/routed_experts_backward.hpp"

namespace distmoe::conformance {

/// Every gradient of the group as FP32, which holds BF16 exactly. Shapes as in GradientOracle.
struct GradientValues {
  std::vector<float> x, scores, gate, up, down, gate_bias, up_bias, down_bias;

  explicit GradientValues(const MoeProblem& problem);
};

/// Where two results differ bit by bit, with the name of the gradient; empty where they are equal.
std::string first_difference(const GradientValues& expected, const GradientValues& actual);

/// The gradients that are further than `tolerance` from the oracle, as relative 2-norms; empty
/// where none is. Biases count where the problem has them.
std::string first_violation(const MoeProblem& problem, const GradientValues& actual,
                            const GradientOracle& oracle, double tolerance);

/// Activation policies that a case trains with.
std::vector<ActivationPolicy> policies_of(const MoeCase& moe_case);

/// How a backward is asked.
struct BackwardForm {
  CallForm call{};
  DType wgrad_dtype = DType::kF32;
  bool accumulates = false;
  double initial = 0.0;  ///< what is in an accumulated destination before; others hold NaN
  ActivationPolicy policy = ActivationPolicy::kFull;
  std::optional<double> slot_factor{};  ///< none recomputes
  CallOptions options{};                ///< of the forward
  bool is_one_element_off = false;      ///< dy and every destination, so that none is aligned
};

/// A training configuration for the problem.
Config training_config(const MoeProblem& problem, const MoeCase& moe_case, const BackwardForm& form,
                       std::int64_t max_tokens);

/// The memory of one rank's dy and gradients.
class RankGradients {
 public:
  RankGradients(const MoeProblem& problem, const std::vector<BF16>& dy, const BackwardForm& form,
                const TokenCounts& counts, int rank);
  TensorView dy() const { return dy_.view(); }
  RoutedGradients destinations() const;
  /// Calls visit(tensor) with dy, then every destination.
  template <typename Visit>
  void for_each_tensor(const Visit& visit) const {
    for (const PackedTensor* tensor : {&dy_, &x_, &scores_, &w13_, &w2_, &bias13_, &bias2_}) {
      visit(*tensor);
    }
  }
  /// The same destinations with other views.
  RoutedGradients destinations(const std::vector<TensorView>& views) const;
  /// Into the place of this rank in `all`; fails the test where a byte around a tensor's elements
  /// changed.
  void copy_to(GradientValues& all) const;
  /// Whether every destination still holds what it held at first.
  bool is_untouched() const;
  /// What a backward that failed leaves where it overwrites: nothing on the CPU, NaN on a device.
  bool is_of_a_failed_call(BackendKind backend) const;

 private:
  const MoeProblem& problem_;
  BackwardForm form_;
  Range tokens_;
  Range experts_;
  PackedTensor dy_, x_, scores_, w13_, w2_, bias13_, bias2_;
  std::vector<std::vector<std::byte>> initial_;
};

/// dy and the destinations of a rank on a device.
class DeviceGradients {
 public:
  DeviceGradients(const RankGradients& host, int device);
  const TensorView& dy() const { return tensors_.front()->view(); }
  const RoutedGradients& destinations() const { return destinations_; }
  /// As they were at first, dy too.
  void bring() const;
  /// Into the host's tensors.
  void fetch() const;

 private:
  const RankGradients& host_;
  std::vector<std::unique_ptr<DeviceTensor>> tensors_;
  RoutedGradients destinations_;
};

/// A saving forward of `context`, waited for, with y in the packed call. The copies of x, ids and
/// scores that a device was given hold NaN and no expert from then on.
SavedForward call_saving(Context& context, const RankCall& call, const CallOptions& options = {});
/// Its backward, waited for, with the gradients in `gradients`, those of one that failed too.
void call_backward(Context& context, SavedForward&& saved, const RankCall& call,
                   const RankGradients& gradients);
/// A backward with dy = x that is asked for nothing.
void call_backward(Context& context, SavedForward&& saved, const RankCall& call);

/// y of a forward as FP32.
std::vector<float> widened(const std::vector<BF16>& rows);

/// Creates a context, runs forward and backward once. The gradients of every rank.
GradientValues run_backward(const MoeProblem& problem, const std::vector<BF16>& dy,
                            const MoeCase& moe_case, const TokenCounts& counts,
                            const BackwardForm& form = {});
GradientValues run_backward(const MoeProblem& problem, const std::vector<BF16>& dy,
                            const MoeCase& moe_case, const BackwardForm& form = {});

}  // namespace distmoe::conformance
