// SPDX-License-Identifier: Apache-2.0
#include "bench/bench_call.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "backend/cpu/thread_pool.hpp"
#include "core/check.hpp"
#include "core/checked_math.hpp"
#include "runtime/backward.hpp"
#include "runtime/cores.hpp"

namespace distmoe::tools {
namespace {

constexpr std::int64_t kBF16Bytes = 2;
constexpr std::int64_t kMaxSamples = 8;

/// Elements [first, first + count) of the noise, in the device's memory.
void* place_noise(BenchDevice& device, const Noise& noise, std::int64_t first, std::int64_t count) {
  auto* data = static_cast<std::byte*>(
      device.allocate(static_cast<std::size_t>(checked_mul(count, kBF16Bytes))));
  for_each_piece(first, count, [&](std::int64_t offset, std::int64_t begin, std::int64_t length) {
    device.copy(data + offset * kBF16Bytes, noise.period().data() + begin,
                static_cast<std::size_t>(length * kBF16Bytes));
  });
  return data;
}

template <typename Value>
void* place_values(BenchDevice& device, const std::vector<Value>& values) {
  void* data = device.allocate(values.size() * sizeof(Value));
  device.copy(data, values.data(), values.size() * sizeof(Value));
  return data;
}

ExpertWeights place_weights(BenchDevice& device, const LayerValues& values,
                            std::int64_t first_expert, std::int64_t num_experts) {
  const std::int64_t d = values.hidden_dim;
  const std::int64_t f = values.intermediate_dim;
  const std::int64_t w2_size = checked_mul(d, f);
  const std::int64_t w13_size = checked_mul(2, w2_size);
  return {.w13_L2FD = {place_noise(device, values.w13, checked_mul(first_expert, w13_size),
                                   checked_mul(num_experts, w13_size)),
                       DType::kBF16,
                       {num_experts, 2 * f, d},
                       device.place()},
          .w2_LDF = {place_noise(device, values.w2, checked_mul(first_expert, w2_size),
                                 checked_mul(num_experts, w2_size)),
                     DType::kBF16,
                     {num_experts, d, f},
                     device.place()}};
}

/// The steps that a mode times, as the one before which the clock starts and the one before which
/// it stops.
struct StepRange {
  ForwardStep begin;
  ForwardStep end;
};

StepRange steps_of(BenchMode mode) {
  switch (mode) {
    case BenchMode::kDispatch: return {ForwardStep::kPublish, ForwardStep::kDispatchW13Swiglu};
    case BenchMode::kGemm: return {ForwardStep::kDispatchW13Swiglu, ForwardStep::kCombine};
    case BenchMode::kCombine: return {ForwardStep::kCombine, ForwardStep::kEnd};
    case BenchMode::kExchangeDispatch:
      return {ForwardStep::kDispatchW13Swiglu, ForwardStep::kW2Scatter};
    case BenchMode::kExchangeCombine: return {ForwardStep::kW2Scatter, ForwardStep::kEnd};
    case BenchMode::kForward:
    case BenchMode::kExchange:
    case BenchMode::kTrain: break;
  }
  throw_error(ErrorCode::kInternal, concat("mode ", to_string(mode), " times no single step"));
}

bool times_whole_call(BenchMode mode) {
  return mode == BenchMode::kForward || mode == BenchMode::kExchange || mode == BenchMode::kTrain;
}

/// Some of [0, num_tokens), first and last among them.
std::vector<std::int64_t> sampled_tokens(std::int64_t num_tokens) {
  const std::int64_t count = std::min(num_tokens, kMaxSamples);
  std::vector<std::int64_t> tokens;
  tokens.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    tokens.push_back(count == 1 ? 0 : i * (num_tokens - 1) / (count - 1));
  }
  return tokens;
}

}  // namespace

BenchWeights::BenchWeights(BenchDevice& device, const LayerValues& values, const Context& context,
                           int num_copies) {
  const Config& config = context.config();
  const bool has_codes = config.precision != Precision::kBF16;
  for (int copy = 0; copy < (has_codes ? 1 : num_copies); ++copy) {
    copies_.push_back(
        place_weights(device, values, context.first_expert(), context.num_local_experts()));
  }
  plain_ = copies_.front();
  if (!has_codes) return;
  copies_.clear();
  const BlockScaledConfig form{.format = config.precision, .inference = config.inference};
  for (int copy = 0; copy < num_copies; ++copy) {
    const auto prepare = [&](const TensorView& weight) {
      return prepared_.emplace_back(prepare_block_scaled_weight(weight, form)).view();
    };
    copies_.push_back(
        {.prepared_w13 = prepare(plain_.w13_L2FD), .prepared_w2 = prepare(plain_.w2_LDF)});
  }
}

double time_lap(BenchDevice& device, const std::function<void(bool)>& lap) {
  if (device.is_asynchronous()) lap(false);
  lap(true);
  device.wait();
  return device.elapsed_us(TimeMark::kBegin, TimeMark::kEnd);
}

void CallCheck::merge(const CallCheck& other) {
  y.merge(other.y);
  grad_x.merge(other.grad_x);
  grad_scores.merge(other.grad_scores);
  is_equal = is_equal && other.is_equal;
}

double CallCheck::rel_l2() const {
  return std::max({y.result().rel_l2, grad_x.result().rel_l2, grad_scores.result().rel_l2});
}

void BenchCall::create_context(int device_ordinal) {
  context_ = std::make_unique<Context>(
      Context::create(case_.config, group_.communicator(),
                      {.backend = options_.backend, .device = device_ordinal}));
}

void BenchCall::place_tensors(const LayerValues& values, const BenchWeights& weights) {
  values_ = &values;
  for (int set = 0; set < static_cast<int>(case_.sets.size()); ++set) add_set(set, weights);
  if (!options_.graph) return;
  for (TensorSet& set : sets_) {
    set.graph = device_.capture([&](void* stream) { enqueue(set, stream, true); });
  }
}

void BenchCall::add_set(int index, const BenchWeights& weights) {
  const RoutedTokens& tokens = case_.sets[static_cast<std::size_t>(index)];
  const std::int64_t t = case_.num_tokens;
  const std::int64_t d = case_.config.hidden_dim;
  const std::int64_t k = case_.config.top_k;
  const std::int64_t first = case_.first_token(index, group_.rank(), group_.size()) * d;
  const Device place = device_.place();
  TensorSet set;
  set.input = {{place_noise(device_, values_->x, first, t * d), DType::kBF16, {t, d}, place},
               {place_values(device_, tokens.ids), DType::kI32, {t, k}, place},
               {place_values(device_, tokens.scores), DType::kF32, {t, k}, place}};
  set.weights = weights.copy(index % case_.num_weight_copies);
  set.y = place_output(DType::kBF16, {t, d});
  if (is_training()) add_gradients(index, set);
  sets_.push_back(std::move(set));
}

TensorView BenchCall::place_output(DType dtype, std::initializer_list<std::int64_t> shape) {
  const TensorView view(nullptr, dtype, shape, device_.place());
  TensorView output = view;
  output.data = device_.allocate(view.num_bytes());
  device_.set_bytes(output.data, 0xFF, view.num_bytes());  // NaN
  return output;
}

void BenchCall::add_gradients(int index, TensorSet& set) {
  const std::int64_t t = case_.num_tokens;
  const std::int64_t d = case_.config.hidden_dim;
  const std::int64_t f = case_.config.intermediate_dim;
  const std::int64_t local = context_->num_local_experts();
  const std::int64_t first = case_.first_token(index, group_.rank(), group_.size()) * d;
  if (std::ssize(weight_gradients_) < case_.num_weight_copies) {
    weight_gradients_.emplace_back(place_output(DType::kBF16, {local, 2 * f, d}),
                                   place_output(DType::kBF16, {local, d, f}));
  }
  const auto& [grad_w13, grad_w2] =
      weight_gradients_[static_cast<std::size_t>(index % case_.num_weight_copies)];
  set.dy = {place_noise(device_, values_->dy, first, t * d), DType::kBF16, {t, d}, device_.place()};
  set.gradients = {.grad_x_TD = place_output(DType::kBF16, {t, d}),
                   .grad_scores_TK = place_output(DType::kF32, {t, case_.config.top_k}),
                   .grad_w13_L2FD = {.tensor = grad_w13},
                   .grad_w2_LDF = {.tensor = grad_w2}};
}

std::vector<TensorView> BenchCall::TensorSet::outputs() const {
  if (!dy.is_given()) return {y};
  return {y, gradients.grad_x_TD, gradients.grad_scores_TK, gradients.grad_w13_L2FD.tensor,
          gradients.grad_w2_LDF.tensor};
}

void BenchCall::call(const TensorSet& set, void* stream, const StepObserver* observer) {
  run_forward(context_->impl(), {.input = set.input,
                                 .weights = set.weights,
                                 .y_TD = set.y,
                                 .options = {.stream = stream},
                                 .observer = observer,
                                 .exchanges_rows = is_exchange(options_.mode)});
}

StepObserver BenchCall::marks_of(void* stream) const {
  return [this, stream, range = steps_of(options_.mode)](ForwardStep next) {
    if (next == range.begin) device_.mark(TimeMark::kBegin, stream);
    if (next == range.end) device_.mark(TimeMark::kEnd, stream);
  };
}

BenchCall::StepWatch BenchCall::watch_steps(void* stream) const {
  // kEnd of the forward is where the backward begins: both set one mark.
  constexpr auto kForwardSteps = static_cast<std::size_t>(ForwardStep::kEnd);
  const auto mark = [this, stream](std::size_t index) { device_.mark(step_mark(index), stream); };
  return {[mark](ForwardStep next) { mark(static_cast<std::size_t>(next)); },
          [mark](BackwardStep next) { mark(kForwardSteps + static_cast<std::size_t>(next)); }};
}

void BenchCall::train(const TensorSet& set, void* stream, const StepWatch& watch) {
  const CallOptions options{.stream = stream};
  const SavedForward saved =
      run_saving_forward(context_->impl(), {.input = set.input,
                                            .weights = set.weights,
                                            .y_TD = set.y,
                                            .options = options,
                                            .observer = watch.forward ? &watch.forward : nullptr});
  device_.mark(TimeMark::kMiddle, stream);
  const BackwardStepObserver marks = [&](BackwardStep next) {
    if (next == BackwardStep::kRestoreActivations) device_.mark(TimeMark::kRestore, stream);
    if (next == BackwardStep::kDispatchGradH3) device_.mark(TimeMark::kRestored, stream);
    if (watch.backward) watch.backward(next);
  };
  run_backward(context_->impl(), {saved, set.dy, set.weights, set.gradients, options, &marks});
}

void BenchCall::enqueue(const TensorSet& set, void* stream, bool marks_steps) {
  if (is_training()) {
    train(set, stream, {});
  } else if (marks_steps && !times_whole_call(options_.mode)) {
    const StepObserver marks = marks_of(stream);
    call(set, stream, &marks);
  } else {
    call(set, stream, nullptr);
  }
}

std::vector<const char*> BenchCall::step_names() const {
  std::vector<const char*> names;
  names.reserve(kMaxStepMarks);
  for (int step = 0; step < static_cast<int>(ForwardStep::kEnd); ++step) {
    names.push_back(to_string(static_cast<ForwardStep>(step)));
  }
  for (int step = 0; is_training() && step < static_cast<int>(BackwardStep::kEnd); ++step) {
    names.push_back(to_string(static_cast<BackwardStep>(step)));
  }
  return names;
}

StepTimes BenchCall::time_steps() {
  void* stream = device_.stream();
  const auto lap = [&](const StepWatch& watch) {
    const TensorSet& set = sets_[num_laps_++ % sets_.size()];
    is_training() ? train(set, stream, watch)
                  : call(set, stream, watch.forward ? &watch.forward : nullptr);
  };
  StepTimes times;
  // A mark of an idle device is where its clock meets the host's.
  device_.wait();
  device_.mark(TimeMark::kEnd, stream);
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  if (device_.is_asynchronous()) lap({});
  device_.mark(TimeMark::kBegin, stream);
  lap(watch_steps(stream));
  device_.wait();
  context_->check();
  times.begin_ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(now).count() +
      static_cast<std::int64_t>(1e3 * device_.elapsed_us(TimeMark::kEnd, TimeMark::kBegin));
  for (std::size_t mark = 0; mark <= step_names().size(); ++mark) {
    times.us.push_back(device_.elapsed_us(TimeMark::kBegin, step_mark(mark)));
  }
  return times;
}

void BenchCall::run_lap(TensorSet& set, bool is_timed) {
  void* stream = device_.stream();
  const bool is_whole = times_whole_call(options_.mode);
  if (is_timed && is_whole) device_.mark(TimeMark::kBegin, stream);
  if (set.graph) {
    set.graph->enqueue();
  } else {
    enqueue(set, stream, is_timed);
  }
  if (is_timed && is_whole) device_.mark(TimeMark::kEnd, stream);
}

double BenchCall::time() {
  const double us = time_lap(device_, [this](bool is_timed) {
    run_lap(sets_[num_laps_ % sets_.size()], is_timed);
    ++num_laps_;
  });
  context_->check();
  return us;
}

/// Of everything that a call writes, piece by piece.
std::vector<Digest> BenchCall::digests_of(const TensorSet& set) const {
  constexpr std::size_t kPiece = std::size_t{16} << 20;
  std::vector<std::byte> piece;
  std::vector<Digest> digests;
  for (const TensorView& output : set.outputs()) {
    for (std::size_t done = 0; done < output.num_bytes(); done += kPiece) {
      piece.resize(std::min(kPiece, output.num_bytes() - done));
      device_.copy(piece.data(), static_cast<const std::byte*>(output.data) + done, piece.size());
      digests.push_back(digest_of(piece));
    }
  }
  return digests;
}

CallCheck BenchCall::check() {
  const TensorSet& set = sets_[(num_laps_ - 1) % sets_.size()];
  CallCheck own;
  // A rank that shares the device must not copy while a peer's call waits for this rank.
  group_.barrier();
  const std::vector<Digest> timed = digests_of(set);
  compare_samples(set, own);
  for (const TensorView& output : set.outputs()) {
    device_.set_bytes(output.data, 0xFF, output.num_bytes());
  }
  group_.barrier();
  enqueue(set, device_.stream(), false);
  device_.wait();
  context_->check();
  group_.barrier();
  own.is_equal = digests_of(set) == timed;
  CallCheck all;
  for (const CallCheck& rank : group_.all_gather(own)) all.merge(rank);
  return all;
}

void BenchCall::compare_samples(const TensorSet& set, CallCheck& check) const {
  const auto index = static_cast<int>((num_laps_ - 1) % sets_.size());
  const RoutedTokens& routed = case_.sets[static_cast<std::size_t>(index)];
  const std::int64_t first = case_.first_token(index, group_.rank(), group_.size());
  const auto k = static_cast<std::size_t>(case_.config.top_k);
  const std::vector<std::int64_t> samples = sampled_tokens(case_.num_tokens);
  std::vector<TokenReference> references(samples.size());
  cpu::ThreadPool pool(static_cast<int>(
      std::min<std::int64_t>(std::ssize(samples), cores_of_this_process().num_cores)));
  pool.run(std::ssize(samples), [&](std::int64_t sample, int) {
    const std::int64_t token = samples[static_cast<std::size_t>(sample)];
    const std::size_t route = static_cast<std::size_t>(token) * k;
    const auto ids = std::span(routed.ids).subspan(route, k);
    const auto scores = std::span(routed.scores).subspan(route, k);
    TokenReference& reference = references[static_cast<std::size_t>(sample)];
    if (is_training()) {
      reference = reference_gradients(*values_, first + token, ids, scores);
    } else {
      const auto row_of = is_exchange(options_.mode) ? exchanged_row : reference_row;
      reference.y = row_of(*values_, first + token, ids, scores);
    }
  });
  const auto compare = [&](const TensorView& output, std::int64_t token,
                           const std::vector<double>& reference, ComparisonSums& sums) {
    const auto width = std::ssize(reference);
    const std::size_t row_bytes = static_cast<std::size_t>(width) * size_of(output.dtype);
    std::vector<std::byte> row(row_bytes);
    device_.copy(
        row.data(),
        static_cast<const std::byte*>(output.data) + static_cast<std::size_t>(token) * row_bytes,
        row_bytes);
    sums.add({static_cast<const void*>(row.data()), output.dtype, {1, width}},
             {static_cast<const void*>(reference.data()), DType::kF64, {1, width}});
  };
  for (std::size_t sample = 0; sample < samples.size(); ++sample) {
    const TokenReference& reference = references[sample];
    compare(set.y, samples[sample], reference.y, check.y);
    if (!is_training()) continue;
    compare(set.gradients.grad_x_TD, samples[sample], reference.grad_x, check.grad_x);
    compare(set.gradients.grad_scores_TK, samples[sample], reference.grad_scores,
            check.grad_scores);
  }
}

}  // namespace distmoe::tools
