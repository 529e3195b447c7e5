// SPDX-License-Identifier: Apache-2.0
#include "bench/bench_call.hpp"

#include <algorithm>
#include <cstring>

#include "backend/cpu/thread_pool.hpp"
#include "core/check.hpp"
#include "core/checked_math.hpp"
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
  return mode == BenchMode::kForward || mode == BenchMode::kExchange;
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

BenchWeights::BenchWeights(BenchDevice& device, const LayerValues& values,
                           std::int64_t first_expert, std::int64_t num_experts, int num_copies) {
  const std::int64_t d = values.hidden_dim;
  const std::int64_t f = values.intermediate_dim;
  const std::int64_t w2_size = checked_mul(d, f);
  const std::int64_t w13_size = checked_mul(2, w2_size);
  for (int copy = 0; copy < num_copies; ++copy) {
    copies_.push_back(
        {.w13_L2FD = {place_noise(device, values.w13, checked_mul(first_expert, w13_size),
                                  checked_mul(num_experts, w13_size)),
                      DType::kBF16,
                      {num_experts, 2 * f, d},
                      device.place()},
         .w2_LDF = {place_noise(device, values.w2, checked_mul(first_expert, w2_size),
                                checked_mul(num_experts, w2_size)),
                    DType::kBF16,
                    {num_experts, d, f},
                    device.place()}});
  }
}

double time_lap(BenchDevice& device, const std::function<void(bool)>& lap) {
  if (device.is_asynchronous()) lap(false);
  lap(true);
  device.wait();
  return device.elapsed_us();
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
    set.graph = device_.capture([&](void* stream) {
      const StepObserver marks =
          times_whole_call(options_.mode) ? StepObserver() : marks_of(stream);
      call(set, stream, marks ? &marks : nullptr);
    });
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
  const auto y_bytes = static_cast<std::size_t>(t * d * kBF16Bytes);
  set.y = {device_.allocate(y_bytes), DType::kBF16, {t, d}, place};
  device_.set_bytes(set.y.data, 0xFF, y_bytes);  // NaN
  sets_.push_back(std::move(set));
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

void BenchCall::run_lap(TensorSet& set, bool is_timed) {
  void* stream = device_.stream();
  const bool is_whole = times_whole_call(options_.mode);
  if (is_timed && is_whole) device_.mark(TimeMark::kBegin, stream);
  if (set.graph) {
    set.graph->enqueue();
  } else if (is_timed && !is_whole) {
    const StepObserver marks = marks_of(stream);
    call(set, stream, &marks);
  } else {
    call(set, stream, nullptr);
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

std::vector<std::byte> BenchCall::output_of(const TensorSet& set) const {
  std::vector<std::byte> bytes(set.y.num_bytes());
  device_.copy(bytes.data(), set.y.data, bytes.size());
  return bytes;
}

CallCheck BenchCall::check() {
  const TensorSet& set = sets_[(num_laps_ - 1) % sets_.size()];
  CallCheck result;
  // A rank that shares the device must not copy while a peer's call waits for this rank.
  group_.barrier();
  const std::vector<std::byte> timed = output_of(set);
  device_.set_bytes(set.y.data, 0xFF, timed.size());
  group_.barrier();
  call(set, device_.stream(), nullptr);
  device_.wait();
  context_->check();
  group_.barrier();
  result.is_equal = output_of(set) == timed;
  compare_samples(timed, result.sums);
  return result;
}

void BenchCall::compare_samples(std::span<const std::byte> y, ComparisonSums& sums) const {
  const auto index = static_cast<int>((num_laps_ - 1) % sets_.size());
  const RoutedTokens& routed = case_.sets[static_cast<std::size_t>(index)];
  const std::int64_t first = case_.first_token(index, group_.rank(), group_.size());
  const std::int64_t d = case_.config.hidden_dim;
  const auto k = static_cast<std::size_t>(case_.config.top_k);
  const std::vector<std::int64_t> samples = sampled_tokens(case_.num_tokens);
  std::vector<std::vector<double>> references(samples.size());
  cpu::ThreadPool pool(static_cast<int>(
      std::min<std::int64_t>(std::ssize(samples), cores_of_this_process().num_cores)));
  pool.run(std::ssize(samples), [&](std::int64_t sample, int) {
    const std::int64_t token = samples[static_cast<std::size_t>(sample)];
    const std::size_t route = static_cast<std::size_t>(token) * k;
    const auto reference = is_exchange(options_.mode) ? exchanged_row : reference_row;
    references[static_cast<std::size_t>(sample)] =
        reference(*values_, first + token, std::span(routed.ids).subspan(route, k),
                  std::span(routed.scores).subspan(route, k));
  });
  for (std::size_t sample = 0; sample < samples.size(); ++sample) {
    sums.add({static_cast<const void*>(y.data() + samples[sample] * d * kBF16Bytes),
              DType::kBF16,
              {1, d}},
             {static_cast<const void*>(references[sample].data()), DType::kF64, {1, d}});
  }
}

}  // namespace distmoe::tools
