// SPDX-License-Identifier: Apache-2.0
#include "training_run.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <utility>

#include "core/check.hpp"
#include "core/checked_math.hpp"
#include "formats/bf16.hpp"
#include "token_split.hpp"

namespace distmoe::tools {
namespace {

/// Steele, Lea and Flood's SplitMix64, of one number.
std::uint64_t hash(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15u;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

std::int64_t product(const std::vector<std::int64_t>& extents) {
  return std::accumulate(extents.begin(), extents.end(), std::int64_t{1}, checked_mul);
}

TensorView view_of(void* data, DType dtype, const std::vector<std::int64_t>& shape) {
  return shape.size() == 2 ? TensorView(data, dtype, {shape[0], shape[1]})
                           : TensorView(data, dtype, {shape[0], shape[1], shape[2]});
}

}  // namespace

void pseudo_random_dy(std::int64_t first, std::int64_t count, std::int64_t hidden_dim,
                      std::span<std::byte> out) {
  for (std::int64_t i = 0; i < count * hidden_dim; ++i) {
    const auto element = static_cast<std::uint64_t>(first * hidden_dim + i);
    const auto signed_bits = static_cast<std::int64_t>(hash(element)) >> 40;
    const BF16 value = to_bf16(static_cast<float>(signed_bits) * 0x1p-23F);
    std::memcpy(out.data() + i * static_cast<std::int64_t>(sizeof(BF16)), &value, sizeof(value));
  }
}

TrainingRun::TrainingRun(const TrainOptions& options, const LayerShape& shape,
                         const RankParts& parts, const RoutedInput& input, const TensorView& dy_TD)
    : options_(options), parts_(parts) {
  const std::int64_t d = shape.hidden_dim;
  const std::int64_t f = shape.intermediate_dim;
  const DType wgrad = weight_gradient_dtype({.wgrad_dtype = options.wgrad_dtype});
  dy_ = make("dy", DType::kBF16, parts.tokens, {d});
  x_ = make("grad_x", DType::kBF16, parts.tokens, {d});
  scores_ = make("grad_scores", input.topk_scores_TK.dtype, parts.tokens,
                 {input.topk_scores_TK.shape[1]});
  w13_ = make("grad_w13", wgrad, parts.experts, {2 * f, d});
  w2_ = make("grad_w2", wgrad, parts.experts, {d, f});
  if (shape.has_bias) {
    bias13_ = make("grad_bias13", wgrad, parts.experts, {2 * f});
    bias2_ = make("grad_bias2", wgrad, parts.experts, {d});
  }
  const std::span<std::byte> dy(dy_.storage.data(), dy_.storage.num_bytes());
  if (dy_TD.is_given()) {
    if (!dy.empty()) std::memcpy(dy.data(), dy_TD.data, dy.size());
  } else {
    pseudo_random_dy(first_of_part(parts.tokens, parts.rank), parts.own_tokens(), d, dy);
  }
}

TrainingRun::Gradient TrainingRun::make(const char* name, DType dtype,
                                        const std::vector<std::int64_t>& parts,
                                        std::vector<std::int64_t> extents) const {
  const auto part = parts[static_cast<std::size_t>(parts_.rank)];
  extents.insert(extents.begin(), part);
  const std::int64_t bytes =
      checked_mul(product(extents), static_cast<std::int64_t>(size_of(dtype)));
  Gradient gradient{.entry = {.name = name, .dtype = dtype, .shape = extents},
                    .parts = parts,
                    .storage = TensorStorage(static_cast<std::size_t>(bytes), name),
                    .view = {},
                    .placed = {}};
  gradient.view = view_of(gradient.storage.data(), dtype, extents);
  gradient.placed = gradient.view;
  gradient.entry.shape[0] = std::accumulate(parts.begin(), parts.end(), std::int64_t{0});
  return gradient;
}

void TrainingRun::Gradient::bring() const {
  if (buffer) buffer->upload(storage.data(), storage.num_bytes());
}

void TrainingRun::Gradient::fetch() const {
  if (buffer) buffer->download(storage.data(), storage.num_bytes());
}

void TrainingRun::place(BackendKind backend, int device) {
  if (backend != BackendKind::kCuda) return;
  for (Gradient* gradient : {&dy_, &x_, &scores_, &w13_, &w2_, &bias13_, &bias2_}) {
    if (!gradient->view.is_given()) continue;
    gradient->buffer.emplace(gradient->storage.num_bytes(), device);
    gradient->placed.data = gradient->buffer->data();
    gradient->placed.device = {DeviceType::kCuda, device};
  }
  dy_.bring();
  if (options_.clip_limit) clip_buffer_.emplace(sizeof(clip_counts_), device);
}

/// Microbatches take the slots in turn; one whose slot is taken waits for the backward of the one
/// that has it.
void TrainingRun::run(Context& context, const DeviceCall& call) {
  forwards_.clear();
  if (options_.accumulates) {
    for (const Gradient* gradient : {&w13_, &w2_, &bias13_, &bias2_}) {
      std::fill_n(gradient->storage.data(), gradient->storage.num_bytes(), std::byte{0});
      gradient->bring();
    }
  }
  std::vector<std::vector<SavedForward>> slots(static_cast<std::size_t>(options_.num_slots));
  for (std::int64_t microbatch = 0; microbatch < options_.num_microbatches; ++microbatch) {
    const std::int64_t slot = microbatch % options_.num_slots;
    std::vector<SavedForward>& live = slots[static_cast<std::size_t>(slot)];
    backward(context, call, live);
    context.select_activation_slot(slot, options_.layers_per_slot);
    forward(context, call, live);
  }
  for (std::int64_t i = 0; i < options_.num_slots; ++i) {
    const std::int64_t slot = (options_.num_microbatches + i) % options_.num_slots;
    backward(context, call, slots[static_cast<std::size_t>(slot)]);
  }
  for (const Gradient* gradient : {&w13_, &w2_, &bias13_, &bias2_}) gradient->fetch();
}

void TrainingRun::forward(Context& context, const DeviceCall& call,
                          std::vector<SavedForward>& slot) {
  CallOptions options;
  if (options_.norm_eps) options.norm = PostExpertNorm{.eps = *options_.norm_eps};
  if (options_.clip_limit) {
    TensorView counts{clip_counts_.data(), DType::kI64, {3}};
    if (clip_buffer_) {
      counts.data = clip_buffer_->data();
      counts.device = dy_.placed.device;
    }
    options.clip_statistics = {counts, *options_.clip_limit};
  }
  for (std::int64_t layer = 0; layer < options_.layers_per_slot; ++layer) {
    slot.push_back(saving_routed_experts(context, call.input(), call.weights(), call.y(), options));
    context.check();
    forwards_.push_back(context.last_call());
  }
  if (clip_buffer_) clip_buffer_->download(clip_counts_.data(), sizeof(clip_counts_));
}

void TrainingRun::backward(Context& context, const DeviceCall& call,
                           std::vector<SavedForward>& slot) {
  const RoutedGradients gradients{.grad_x_TD = x_.placed,
                                  .grad_scores_TK = scores_.placed,
                                  .grad_w13_L2FD = {w13_.placed, options_.accumulates},
                                  .grad_w2_LDF = {w2_.placed, options_.accumulates},
                                  .grad_bias13_L2F = {bias13_.placed, options_.accumulates},
                                  .grad_bias2_LD = {bias2_.placed, options_.accumulates}};
  for (; !slot.empty(); slot.pop_back()) {
    routed_experts_backward(context, std::move(slot.back()), dy_.placed, call.weights(), gradients);
    context.check();
    x_.fetch();
    scores_.fetch();
    Digest digest = digest_of({x_.storage.data(), x_.storage.num_bytes()});
    const Digest scores = digest_of({scores_.storage.data(), scores_.storage.num_bytes()});
    digest.low ^= scores.high;
    digest.high ^= scores.low;
    if (!std::exchange(has_first_, true)) first_ = digest;
    is_repeatable_ = is_repeatable_ && digest == first_;
  }
}

Digest TrainingRun::digest() const {
  std::vector<Digest> digests;
  for (const Gradient* gradient : {&x_, &scores_, &w13_, &w2_, &bias13_, &bias2_}) {
    digests.push_back(digest_of({gradient->storage.data(), gradient->storage.num_bytes()}));
  }
  return digest_of(std::as_bytes(std::span(digests)));
}

std::vector<OutputTensor> TrainingRun::outputs() const {
  std::vector<OutputTensor> outputs;
  for (const Gradient* gradient : {&dy_, &x_, &scores_, &w13_, &w2_, &bias13_, &bias2_}) {
    if (!gradient->view.is_given()) continue;
    outputs.push_back({gradient->entry,
                       gradient->parts,
                       {gradient->storage.data(), gradient->storage.num_bytes()}});
  }
  return outputs;
}

}  // namespace distmoe::tools
