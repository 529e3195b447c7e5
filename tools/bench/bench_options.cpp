// SPDX-License-Identifier: Apache-2.0
#include "bench/bench_options.hpp"

#include <CLI/CLI.hpp>
#include <array>
#include <limits>

#include "core/check.hpp"
#include "option_declaration.hpp"
#include "plan/option_names.hpp"

namespace distmoe::tools {
namespace {

constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();
constexpr int kMaxRanks = 1024;
constexpr int kMaxRounds = 10000;
constexpr int kMaxRows = 64;

constexpr std::array kModes = {"forward",           "dispatch",        "gemm",
                               "combine",           "train",           "exchange",
                               "exchange-dispatch", "exchange-combine"};

constexpr const char* kFooter =
    "A shape is a model of 'distmoe plan --help' or D,F,E,K; '@L' after it gives every rank L "
    "experts.\n'each' stands for Mixtral-8x7B, DeepSeek-V3@32, Qwen3-235B-A22B, gpt-oss-120b,\n"
    "Qwen3-30B-A3B and OLMoE-1B-7B.\n\n"
    "Modes: forward = the whole call; dispatch = publishing and ordering the routes; gemm = both\n"
    "products with the rows that travel inside them; combine = the weighted sum; train = a "
    "forward\n"
    "that saves, and its backward with BF16 gradients of x, scores and weights.\n"
    "On CUDA also exchange = a call whose experts return their rows as they are;\n"
    "exchange-dispatch = the rows' way to the experts; exchange-combine = their way back and the\n"
    "weighted sum.\n\n"
    "Exit code: 0, 2 wrong arguments or files, 3 failure at run time, or a timed call that was "
    "wrong.\n\n"
    "Examples:\n"
    "  distmoe bench --shape Qwen3-30B-A3B --tokens 64 1024\n"
    "  distmoe bench --shape each --tokens 8192 --ranks 2 --backend cuda --json\n"
    "  distmoe bench --shape 2048,768,64,8 --tokens 1 16 --backend cuda --graph --routing zipf\n"
    "  mpirun -n 2 distmoe bench --engine mpi --shape 2048,768,64,8 --tokens 512\n";

void add_shapes_and_routing(CLI::App& app, BenchOptions& options) {
  app.add_option_function<std::vector<std::string>>(
         "--shape",
         [&options](const std::vector<std::string>& texts) {
           for (const std::string& text : texts) {
             for (BenchShape& shape : parse_bench_shapes(text)) {
               options.shapes.push_back(std::move(shape));
             }
           }
         },
         "Layers, up to 64: NAME, D,F,E,K, either with @L, or each")
      ->type_name("SHAPE")
      ->expected(1, kMaxRows)
      ->required();
  app.add_option_function<std::vector<std::string>>(
         "--tokens",
         [&options](const std::vector<std::string>& texts) {
           for (const std::string& text : texts) {
             options.tokens.push_back(parse_integer("--tokens", text, 1, kMaxCount));
           }
         },
         "Tokens of each rank in a call (T), up to 64 numbers")
      ->type_name("N")
      ->expected(1, kMaxRows)
      ->required();
  add(app, "--mode",
      "forward|dispatch|gemm|combine|train|exchange|exchange-dispatch|exchange-combine",
      "What is timed [forward]", [&options](const std::string& text) {
        options.mode =
            static_cast<BenchMode>(parse_name("--mode", text, {kModes.begin(), kModes.end()}));
      });
  add(app, "--combine", "per_route|per_rank", "As Config::combine [per_route]",
      [&options](const std::string& text) {
        options.combine =
            static_cast<Combine>(parse_name("--combine", text, {"per_route", "per_rank"}));
      });
  add(app, "--routing", "uniform|zipf|FILE",
      "Random experts, or those of a safetensors file as 'run --input' takes [uniform]",
      [&options](const std::string& text) {
        DISTMOE_CHECK(!text.empty(), kInvalidArgument,
                      "--routing is empty; legal: uniform, zipf or a path");
        options.routing = text == "uniform" ? RoutingKind::kUniform
                          : text == "zipf"  ? RoutingKind::kZipf
                                            : RoutingKind::kCaptured;
        options.routing_file = options.routing == RoutingKind::kCaptured ? text : std::string();
      });
  add(app, "--routing-layer", "N", "Layer of that file [0]", [&options](const std::string& text) {
    options.routing_layer = parse_integer("--routing-layer", text, 0, kMaxCount);
  });
}

void add_training_options(CLI::App& app, BenchOptions& options) {
  const auto note = [&options](const char* name) {
    if (options.first_of_training.empty()) options.first_of_training = name;
  };
  add(app, "--activation-policy", "full|lean", "What a saving forward keeps [full]",
      [&options, note](const std::string& text) {
        note("--activation-policy");
        options.activation_policy = static_cast<ActivationPolicy>(
            parse_name("--activation-policy", text, {"full", "lean"}));
      });
  app.add_flag_callback(
      "--recompute",
      [&options, note] {
        note("--recompute");
        options.recompute = true;
      },
      "Slots keep inputs alone: the backward computes its layer again");
}

void add_how_to_measure(CLI::App& app, BenchOptions& options) {
  app.add_flag("--graph", options.graph, "Replay CUDA graphs of the calls (--backend cuda)");
  app.add_flag("--steps", options.steps,
               "Also time every step of whole calls, in calls of their own");
  app.add_flag("--peers", options.peers,
               "Also time layers of PyTorch in the same rounds (one rank; left out by name where "
               "it is not installed)");
  add(app, "--python", "PROGRAM", "Python that has PyTorch [python3]",
      [&options](const std::string& text) {
        DISTMOE_CHECK(!text.empty(), kInvalidArgument, "--python is empty; legal: a program");
        options.python = text;
      });
  add_count(app, "--rounds", "Times that every row is measured, in turn [21]", kMaxRounds,
            [&options](std::int64_t value) { options.rounds = static_cast<int>(value); });
  add(app, "--tolerance", "X",
      "Largest relative L2 distance of the timed call to a plain computation [of the precision]",
      [&options](const std::string& text) {
        options.tolerance = parse_real("--tolerance", text, Zero::kLegal);
      });
}

}  // namespace

const char* to_string(BenchMode mode) noexcept { return kModes[static_cast<std::size_t>(mode)]; }

bool is_exchange(BenchMode mode) noexcept {
  return mode == BenchMode::kExchange || mode == BenchMode::kExchangeDispatch ||
         mode == BenchMode::kExchangeCombine;
}

double noise_tolerance(Precision precision) noexcept {
  switch (precision) {
    case Precision::kBF16: break;
    case Precision::kMXFP8: return 0.12;
    case Precision::kNVFP4: return 0.40;
    case Precision::kMXFP4: return 0.32;
  }
  return default_tolerance(precision);
}

std::string BenchOptions::routing_text() const {
  switch (routing) {
    case RoutingKind::kUniform: return "uniform";
    case RoutingKind::kZipf: return "zipf";
    case RoutingKind::kCaptured: break;
  }
  return routing_file.string();
}

std::string BenchOptions::command_text() const {
  std::string text = "distmoe bench --shape";
  for (const BenchShape& shape : shapes) text += " " + shape.name;
  text += " --tokens";
  for (const std::int64_t count : tokens) text += concat(" ", count);
  const auto add_unless = [&text](bool is_default, const std::string& words) {
    if (!is_default) text += " " + words;
  };
  add_unless(mode == BenchMode::kForward, concat("--mode ", to_string(mode)));
  add_unless(routing == RoutingKind::kUniform, concat("--routing ", routing_text()));
  add_unless(routing_layer == 0, concat("--routing-layer ", routing_layer));
  add_unless(precision == Precision::kBF16, concat("--precision ", option_name(precision)));
  add_unless(pipeline == Pipeline::kStaged, concat("--pipeline ", option_name(pipeline)));
  add_unless(combine == Combine::kPerRoute, "--combine per_rank");
  add_unless(activation_policy == ActivationPolicy::kFull, "--activation-policy lean");
  add_unless(!recompute, "--recompute");
  add_unless(!ranks, concat("--ranks ", ranks.value_or(1)));
  add_unless(engine == Engine::kThreads, concat("--engine ", to_string(engine)));
  add_unless(backend == BackendKind::kCpu, "--backend cuda");
  add_unless(!num_sms, concat("--sms ", num_sms.value_or(0)));
  add_unless(!graph, "--graph");
  add_unless(!steps, "--steps");
  add_unless(!peers, "--peers");
  add_unless(rounds == BenchOptions().rounds, concat("--rounds ", rounds));
  return text;
}

void check_together(const BenchOptions& options) {
  DISTMOE_CHECK(options.mode == BenchMode::kTrain || options.first_of_training.empty(),
                kInvalidArgument, options.first_of_training,
                " is an option of training: it needs --mode train");
  DISTMOE_CHECK(!options.graph || options.backend == BackendKind::kCuda, kInvalidArgument,
                "--graph captures CUDA graphs: it needs --backend cuda");
  DISTMOE_CHECK(!options.num_sms || options.backend == BackendKind::kCuda, kInvalidArgument,
                "--sms counts multiprocessors of a GPU: it needs --backend cuda");
  DISTMOE_CHECK(!is_exchange(options.mode) || options.backend == BackendKind::kCuda, kUnsupported,
                "--mode ", to_string(options.mode),
                " is of the CUDA backend: on the CPU rows move within the first product's step");
}

void add_call_options(CLI::App& app, BenchOptions& options) {
  add_shapes_and_routing(app, options);
  add_precision_options(app, options.precision, options.pipeline);
  add_training_options(app, options);
}

void add_place_options(CLI::App& app, BenchOptions& options) {
  add_count(app, "--ranks", "Expert-parallel ranks [1; under mpirun the launcher's]", kMaxRanks,
            [&options](std::int64_t value) { options.ranks = static_cast<int>(value); });
  add_engine_option(app, options.engine);
  add_backend_option(app, options.backend);
  add_count(app, "--sms", "Streaming multiprocessors of a rank, as Config::num_sms [all]",
            kMaxCount, [&options](std::int64_t value) { options.num_sms = value; });
  add_timeout_option(app, options.timeout);
}

void add_bench_options(CLI::App& app, BenchOptions& options) {
  app.footer(kFooter);
  add_call_options(app, options);
  add_place_options(app, options);
  add_how_to_measure(app, options);
  app.add_flag("--json", options.json, "Print one JSON object a row on stdout and nothing else");
}

}  // namespace distmoe::tools
