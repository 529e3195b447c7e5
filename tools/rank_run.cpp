// SPDX-License-Identifier: Apache-2.0
#include "rank_run.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "code_dump.hpp"
#include "comparison.hpp"
#include "core/check.hpp"
#include "core/checked_math.hpp"
#include "destination.hpp"
#include "device_call.hpp"
#include "digest.hpp"
#include "distmoe/context.hpp"
#include "distmoe/routed_experts.hpp"
#include "io/checkpoint.hpp"
#include "io/routed_input.hpp"
#include "layer_config.hpp"
#include "layer_weights.hpp"
#include "layout/packed_row.hpp"
#include "output_error.hpp"
#include "output_gather.hpp"
#include "plan/option_names.hpp"
#include "progress.hpp"
#include "quantised_experts.hpp"
#include "rank_facts.hpp"
#include "rank_group.hpp"
#include "rank_launch.hpp"
#include "report.hpp"
#include "standard_output.hpp"
#include "token_split.hpp"
#include "training_run.hpp"

namespace distmoe::tools {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kBF16Bytes = 2;

// `view`'s rows [first, first + count); the view is contiguous with two dimensions.
TensorView rows_of(const TensorView& view, std::int64_t first, std::int64_t count) {
  const auto row_bytes = view.shape[1] * static_cast<std::int64_t>(size_of(view.dtype));
  const auto* data = static_cast<const std::byte*>(view.data);
  return {data == nullptr ? nullptr : static_cast<const void*>(data + first * row_bytes),
          view.dtype,
          {count, view.shape[1]}};
}

/// An input and what this rank's calls make of it.
struct InputRun {
  RoutedInputFile file;
  TensorStorage y;  ///< of the own tokens
  std::optional<Digest> first_digest;
};

class RankRun {
 public:
  RankRun(const RunOptions& options, std::shared_ptr<Communicator> communicator, MemoryMeter& meter,
          int ranks_in_process)
      : options_(options),
        meter_(meter),
        ranks_in_process_(ranks_in_process),
        group_(std::move(communicator), options.timeout),
        progress_(group_.is_first()) {}

  RankGroup& group() noexcept { return group_; }

  /// The steps of a run, in order. prepare(), place_tensors(), finish() and commit() may fail on
  /// one rank alone: the ranks agree after them.
  void prepare();
  std::string settings() const;
  void create_context();
  void place_tensors();
  void make_calls();
  Failure finish();
  Failure commit() {
    output_.commit();
    return output_.failure();
  }
  /// Leaves nothing on the terminal's line or on disk.
  void clean_up() {
    progress_.clear();
    output_.discard();
  }

 private:
  void prepare_training();
  Config make_config() const;
  std::vector<std::filesystem::path> files_read() const;
  void open_inputs();
  void check_same_shape(const InputRun& first, const InputRun& second) const;
  RoutedInput own_input(const InputRun& input) const;
  TensorView y(const InputRun& input) const;
  RankFacts facts() const;
  RunReport make_report(const std::vector<RankFacts>& facts,
                        std::vector<double> call_seconds) const;
  TrainingReport training_report(const RankFacts& together) const;
  std::vector<OutputTensor> outputs() const;
  /// The reference is of the layer without a norm.
  bool has_reference(const InputRun& input) const {
    return input.file.y_ref().is_given() && !options_.train.norm_eps;
  }
  void print(const RunReport& report) const;
  Failure judge(const RunReport& report) const;

  int device() const { return device_of_rank(options_.rank_setup(), group_.rank()); }
  std::int64_t own_tokens() const { return tokens_per_rank_[own_index()]; }
  std::size_t own_index() const { return static_cast<std::size_t>(group_.rank()); }

  const RunOptions& options_;
  MemoryMeter& meter_;
  int ranks_in_process_;
  RankGroup group_;
  Progress progress_;

  std::vector<InputRun> inputs_;  ///< one, or two whose calls alternate
  std::unique_ptr<Checkpoint> checkpoint_;
  std::vector<std::int64_t> tokens_per_rank_;
  std::vector<std::int64_t> experts_per_rank_;
  LayerWeights weights_;
  std::unique_ptr<Context> context_;
  std::unique_ptr<DeviceCall> call_;
  std::unique_ptr<TrainingRun> training_;  ///< with --train
  std::vector<std::int64_t> slot_peaks_;   ///< of the rank with most, with --train
  std::vector<double> call_seconds_;
  bool repeat_bitwise_equal_ = true;
  OutputGather output_;
  CodeDump codes_;  ///< of --dump-codes
};

void RankRun::prepare() {
  check_together(options_, group_.size());
  progress_.show("reading the checkpoint");
  checkpoint_ = std::make_unique<Checkpoint>(Checkpoint::open(options_.checkpoint));
  if (group_.is_first() && !options_.output.empty()) {
    check_destination("--output", options_.output, files_read());
  }
  if (!options_.dump_codes.empty()) {
    std::vector<std::filesystem::path> kept = files_read();
    if (!options_.output.empty()) kept.push_back(options_.output);
    check_destination("--dump-codes", options_.dump_codes, kept);
  }
  open_inputs();
  const LayerShape& shape = checkpoint_->shape();
  tokens_per_rank_ =
      split_tokens(inputs_[0].file.num_tokens(), group_.size(), options_.tokens_per_rank);
  experts_per_rank_ = split_evenly(shape.num_experts, group_.size());
  // What the sizes rule out is known before a byte of a weight is read.
  validate(make_config());
  progress_.show("loading experts");
  weights_ =
      LayerWeights(*checkpoint_, {.layer = options_.layer,
                                  .first_expert = first_of_part(experts_per_rank_, group_.rank()),
                                  .num_experts = experts_per_rank_[own_index()],
                                  .precision = options_.precision,
                                  .inference = !options_.train.is_on});
  for (InputRun& input : inputs_) {
    input.y = TensorStorage(
        static_cast<std::size_t>(checked_product(own_tokens(), shape.hidden_dim, kBF16Bytes)),
        "the output");
  }
  if (options_.train.is_on) prepare_training();
}

void RankRun::prepare_training() {
  const TensorView& dy = inputs_[0].file.dy();
  const std::int64_t first = first_of_part(tokens_per_rank_, group_.rank());
  training_ = std::make_unique<TrainingRun>(
      options_.train, checkpoint_->shape(),
      RankParts{tokens_per_rank_, experts_per_rank_, group_.rank()}, own_input(inputs_[0]),
      dy.is_given() ? rows_of(dy, first, own_tokens()) : TensorView{});
}

/// Which no output may replace.
std::vector<std::filesystem::path> RankRun::files_read() const {
  std::vector<std::filesystem::path> files = checkpoint_->files();
  files.push_back(options_.input_path());
  if (!options_.input2.empty()) files.push_back(options_.input2);
  return files;
}

void RankRun::open_inputs() {
  const std::int64_t hidden = checkpoint_->shape().hidden_dim;
  std::vector<std::filesystem::path> paths = {options_.input_path()};
  if (!options_.input2.empty()) paths.push_back(options_.input2);
  for (const std::filesystem::path& path : paths) {
    inputs_.push_back({RoutedInputFile::open(path, options_.layer), {}, {}});
    const TensorView& x = inputs_.back().file.input().x_TD;
    DISTMOE_CHECK(x.shape[1] == hidden, kInvalidArgument, "layer ", options_.layer, " of ", path,
                  " has x ", x.describe(), ", but the hidden size of the checkpoint is ", hidden);
  }
  if (inputs_.size() == 2) check_same_shape(inputs_[0], inputs_[1]);
}

// A graph replays one shape, and calls that alternate share their tensors on a device.
void RankRun::check_same_shape(const InputRun& first, const InputRun& second) const {
  const RoutedInput& a = first.file.input();
  const RoutedInput& b = second.file.input();
  for (const auto& [name, one, two] :
       {std::tuple("x", a.x_TD, b.x_TD), std::tuple("topk_ids", a.topk_ids_TK, b.topk_ids_TK),
        std::tuple("topk_scores", a.topk_scores_TK, b.topk_scores_TK)}) {
    DISTMOE_CHECK(one.dtype == two.dtype && one.shape == two.shape, kInvalidArgument,
                  "--input2 needs the shapes and types of --input: ", name, " is ", one.describe(),
                  " there and ", two.describe(), " in ", options_.input2);
  }
}

// All that must be the same on every rank and that no plan of the context covers.
std::string RankRun::settings() const {
  std::string text =
      concat("--layer ", options_.layer, " --repeat ", options_.num_calls(),
             options_.graph ? " --graph" : "", options_.output.empty() ? "" : " --output");
  for (const InputRun& input : inputs_) {
    text += concat(", input of ", input.file.num_tokens(), " tokens ",
                   input.file.y_ref().is_given() ? "with" : "without", " reference");
  }
  if (training_) {
    const TrainOptions& train = options_.train;
    text += concat(", --train --microbatches ", train.num_microbatches,
                   train.accumulates ? " --accumulate" : "",
                   train.norm_eps ? concat(" --rmsnorm ", *train.norm_eps) : "",
                   train.clip_limit ? concat(" --clip-limit ", *train.clip_limit) : "",
                   inputs_[0].file.dy().is_given() ? " with" : " without", " dy");
  }
  text += ", tokens per rank";
  for (const std::int64_t tokens : tokens_per_rank_) text += concat(" ", tokens);
  return text;
}

Config RankRun::make_config() const {
  Config config = layer_config(checkpoint_->shape(),
                               *std::max_element(tokens_per_rank_.begin(), tokens_per_rank_.end()),
                               inputs_[0].file.top_k(), group_.size());
  if (options_.device_factor) config.device_scratch_capacity_factor = *options_.device_factor;
  if (options_.total_factor) {
    config.host_scratch = HostScratch{.total_scratch_capacity_factor = *options_.total_factor};
  }
  config.precision = options_.precision;
  config.pipeline = options_.pipeline;
  config.combine = options_.combine;
  config.timeout = options_.timeout;
  options_.train.configure(config);
  return config;
}

RoutedInput RankRun::own_input(const InputRun& input) const {
  const std::int64_t first = first_of_part(tokens_per_rank_, group_.rank());
  const RoutedInput& all = input.file.input();
  return {rows_of(all.x_TD, first, own_tokens()), rows_of(all.topk_ids_TK, first, own_tokens()),
          rows_of(all.topk_scores_TK, first, own_tokens())};
}

TensorView RankRun::y(const InputRun& input) const {
  return {input.y.data(), DType::kBF16, {own_tokens(), checkpoint_->shape().hidden_dim}};
}

void RankRun::create_context() {
  context_ = std::make_unique<Context>(Context::create(
      make_config(), group_.communicator(), {.backend = options_.backend, .device = device()}));
}

void RankRun::place_tensors() {
  const InputRun& first = inputs_[0];
  call_ = std::make_unique<DeviceCall>(options_.backend, device(), own_input(first),
                                       weights_.view(), y(first));
  if (training_) training_->place(options_.backend, device());
  if (options_.graph) call_->capture(*context_);
}

void RankRun::make_calls() {
  if (!options_.dump_codes.empty()) {
    codes_.run(*context_, own_input(inputs_[0]), weights_.view(), y(inputs_[0]));
  }
  for (int call = 0; call < options_.num_calls(); ++call) {
    progress_.show("running call", call + 1, options_.num_calls());
    InputRun& input = inputs_[static_cast<std::size_t>(call) % inputs_.size()];
    if (inputs_.size() > 1) call_->bring(own_input(input), y(input));
    group_.barrier();
    const auto begin = Clock::now();
    if (training_) {
      training_->run(*context_, *call_);
    } else {
      call_->run(*context_);
    }
    call_seconds_.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    call_->fetch_y();
    Digest digest = digest_of({input.y.data(), input.y.num_bytes()});
    if (training_) {
      const std::array<Digest, 2> both{digest, training_->digest()};
      digest = digest_of(std::as_bytes(std::span(both)));
      repeat_bitwise_equal_ = repeat_bitwise_equal_ && training_->is_repeatable();
    }
    if (!input.first_digest) input.first_digest = digest;
    repeat_bitwise_equal_ = repeat_bitwise_equal_ && digest == *input.first_digest;
  }
}

RankFacts RankRun::facts() const {
  RankFacts facts;
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    const TensorView& y_ref = inputs_[i].file.y_ref();
    if (!has_reference(inputs_[i])) continue;
    const std::int64_t first = first_of_part(tokens_per_rank_, group_.rank());
    facts.sums[i].add(y(inputs_[i]), rows_of(y_ref, first, own_tokens()));
  }
  facts.planned_bytes = context_->memory_plan().allocated_bytes;
  facts.peak_bytes = meter_.peak_growth_bytes() / ranks_in_process_;
  facts.weight_bytes = weights_.num_bytes();
  facts.repeat_bitwise_equal = repeat_bitwise_equal_ ? 1 : 0;
  if (training_) {
    const RegionPeaks peaks = context_->region_peaks();
    facts.device_scratch_peak_bytes = peaks.device_scratch_bytes;
    facts.host_scratch_peak_bytes = peaks.host_scratch_bytes;
    facts.clip_counts = training_->clip_counts();
  }
  return facts;
}

RunReport RankRun::make_report(const std::vector<RankFacts>& facts,
                               std::vector<double> call_seconds) const {
  RunReport report;
  report.checkpoint = options_.checkpoint.string();
  report.architecture = checkpoint_->architecture();
  report.layer = options_.layer;
  report.ranks = group_.size();
  report.engine = to_string(options_.engine);
  report.backend = to_string(options_.backend);
  report.combine = option_name(options_.combine);
  report.precision = option_name(options_.precision);
  if (is_block_scaled(options_.precision)) report.pipeline = option_name(options_.pipeline);
  if (options_.precision != Precision::kBF16) {
    report.has_stored_codes = weights_.has_stored_codes();
    const std::optional<StoredFormat> format = checkpoint_->stored_format(options_.layer);
    report.stored_format = format ? format_name(*format) : "several formats";
  }
  report.tokens = inputs_[0].file.num_tokens();
  report.tokens_per_rank = tokens_per_rank_;
  const CallStatistics statistics = context_->last_call();
  report.rows_per_rank = statistics.rows_per_rank;
  report.rows_per_expert = statistics.rows_per_expert;
  report.layers = training_ ? training_->forwards() : std::vector{statistics};
  report.experts_per_rank = experts_per_rank_;
  report.tolerance = options_.used_tolerance();
  report.call_seconds = std::move(call_seconds);
  report.plan = context_->memory_plan();
  const RankFacts together = merge_facts(facts);
  report.planned_bytes = together.planned_bytes;
  report.peak_bytes = together.peak_bytes;
  report.weight_bytes = together.weight_bytes;
  report.repeat_bitwise_equal = together.repeat_bitwise_equal != 0;
  const auto comparison_of = [&](std::size_t i) -> std::optional<Comparison> {
    if (i >= inputs_.size() || !has_reference(inputs_[i])) return std::nullopt;
    return together.sums[i].result();
  };
  report.comparison = comparison_of(0);
  report.is_reference_of_another_layer =
      inputs_[0].file.y_ref().is_given() && options_.train.norm_eps.has_value();
  report.has_input2 = inputs_.size() > 1;
  report.comparison2 = comparison_of(1);
  if (training_) report.training = training_report(together);
  return report;
}

TrainingReport RankRun::training_report(const RankFacts& together) const {
  TrainingReport training{.num_forwards = options_.train.num_forwards(),
                          .num_recomputed = training_->num_recomputed(),
                          .peaks = {.slot_bytes = slot_peaks_}};
  training.peaks.device_scratch_bytes = together.device_scratch_peak_bytes;
  training.peaks.host_scratch_bytes = together.host_scratch_peak_bytes;
  if (options_.train.clip_limit) training.clip_counts = together.clip_counts;
  return training;
}

std::vector<OutputTensor> RankRun::outputs() const {
  std::vector<OutputTensor> outputs;
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    OutputTensor output;
    output.entry.name = i == 0 ? "y" : concat("y", i + 1);
    output.entry.shape = {inputs_[i].file.num_tokens(), checkpoint_->shape().hidden_dim};
    output.parts = tokens_per_rank_;
    output.own = {inputs_[i].y.data(), inputs_[i].y.num_bytes()};
    outputs.push_back(std::move(output));
  }
  if (training_) {
    for (OutputTensor& gradient : training_->outputs()) outputs.push_back(std::move(gradient));
  }
  return outputs;
}

void RankRun::print(const RunReport& report) const {
  std::string text = options_.json ? json_of(report) : text_of(report);
  if (options_.stats && options_.json) {
    std::fputs(stats_text_of(report).c_str(), stderr);
  } else if (options_.stats) {
    text += stats_text_of(report);
  }
  write_stdout(text);
}

Failure RankRun::finish() {
  if (!options_.dump_codes.empty()) {
    const Failure unwritten =
        attempt([&] { write_output([&] { codes_.write(options_.dump_codes); }); });
    if (unwritten.happened()) return unwritten;
  }
  if (!options_.output.empty()) output_.run(group_, options_.output, outputs());
  if (training_) slot_peaks_ = group_.largest(context_->region_peaks().slot_bytes);
  const std::vector<RankFacts> all_facts = group_.all_gather(facts());
  std::vector<double> slowest = group_.largest(call_seconds_);
  if (!group_.is_first() || output_.failure().happened()) return output_.failure();

  Failure failure;
  const Failure unprinted = attempt([&] {
    const RunReport report = make_report(all_facts, std::move(slowest));
    progress_.clear();
    print(report);
    failure = judge(report);
  });
  return unprinted.happened() ? unprinted : failure;
}

Failure RankRun::judge(const RunReport& report) const {
  if (is_within_tolerance(report)) return {};
  return {ExitCode::kOutsideTolerance, ErrorCode::kInternal,
          concat("layer ", options_.layer, " of ", options_.checkpoint,
                 " is outside the tolerance: the relative L2 distance to y_ref is ",
                 distance_text(std::max(report.comparison.value_or(Comparison{}).rel_l2,
                                        report.comparison2.value_or(Comparison{}).rel_l2)),
                 ", legal is at most ", options_.used_tolerance())};
}

Failure set_up(RankRun& run) {
  Failure failure = attempt_together(is_known_to_all_creators, [&] { run.create_context(); });
  if (!failure.happened()) failure = attempt([&] { run.place_tensors(); });
  return run.group().agree(failure);
}

ExitCode run_steps(RankRun& run) {
  RankGroup& group = run.group();
  Failure failure = group.agree(attempt([&] { run.prepare(); }));
  if (!failure.happened()) failure = group.find_difference(run.settings());
  if (!failure.happened()) failure = set_up(run);
  if (!failure.happened()) {
    failure = attempt_together(is_known_to_all_callers, [&] { run.make_calls(); });
  }
  if (!failure.happened()) failure = group.agree(run.finish());
  if (failure.exit_code <= ExitCode::kOutsideTolerance) {
    const Failure uncommitted = group.agree(run.commit());
    if (uncommitted.happened()) failure = uncommitted;
  }
  if (group.is_first()) run.clean_up();
  return leave_together(group, failure);
}

}  // namespace

RankOutcome run_rank(const RunOptions& options, const std::shared_ptr<Communicator>& communicator,
                     MemoryMeter& meter, int ranks_in_process) {
  RankRun run(options, communicator, meter, ranks_in_process);
  return run_rank_steps(
      *communicator, [&] { return run_steps(run); }, [&] { run.clean_up(); });
}

}  // namespace distmoe::tools
