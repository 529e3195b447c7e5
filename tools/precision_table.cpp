// SPDX-License-Identifier: Apache-2.0
#include "precision_table.hpp"

#include <array>
#include <cstddef>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "core/checked_math.hpp"
#include "distmoe/context.hpp"
#include "distmoe/routed_experts.hpp"
#include "layer_config.hpp"
#include "layer_weights.hpp"
#include "plan/option_names.hpp"
#include "report.hpp"

namespace distmoe::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array kPrecisions{Precision::kBF16, Precision::kMXFP8, Precision::kNVFP4,
                                 Precision::kMXFP4};

TensorView row_of(const TensorView& rows, std::int64_t token) {
  const auto row_bytes = rows.shape[1] * static_cast<std::int64_t>(size_of(rows.dtype));
  return {
      static_cast<const std::byte*>(rows.data) + token * row_bytes, rows.dtype, {1, rows.shape[1]}};
}

void compare(const TensorView& y, const TensorView& reference, PrecisionRow& row) {
  ComparisonSums sums;
  sums.add(y, reference);
  row.comparison = sums.result();
  for (std::int64_t token = 0; token < y.shape[0]; ++token) {
    ComparisonSums of_token;
    of_token.add(row_of(y, token), row_of(reference, token));
    const Comparison distance = of_token.result();
    // A row without a number on either side is as it should be, or nothing is.
    if (distance.num_left_out == y.shape[1]) continue;
    if (row.worst.token < 0 || distance.rel_l2 > row.worst.rel_l2) {
      row.worst = {token, distance.rel_l2};
    }
  }
}

std::string worst_text(const WorstRow& worst) {
  return worst.token < 0 ? "none" : concat(distance_text(worst.rel_l2), " (", worst.token, ')');
}

/// y of one precision; the row learns the bytes of the weights.
TensorStorage run_precision(const Checkpoint& checkpoint, const RoutedInputFile& input,
                            PrecisionRow& row) {
  const LayerShape& shape = checkpoint.shape();
  Config config = layer_config(shape, input.num_tokens(), input.top_k(), 1);
  config.precision = row.precision;
  validate(config);
  const LayerWeights weights(checkpoint, {.layer = row.layer,
                                          .num_experts = shape.num_experts,
                                          .precision = row.precision,
                                          .inference = config.inference});
  row.weight_bytes = weights.num_bytes();
  constexpr std::int64_t kBF16Bytes = 2;
  TensorStorage y(
      static_cast<std::size_t>(checked_product(input.num_tokens(), shape.hidden_dim, kBF16Bytes)),
      "the output");
  Context context = Context::create(config);
  routed_experts(context, input.input(), weights.view(),
                 {y.data(), DType::kBF16, {input.num_tokens(), shape.hidden_dim}});
  return y;
}

}  // namespace

std::vector<PrecisionRow> compare_precisions(const Checkpoint& checkpoint, std::int64_t layer,
                                             const RoutedInputFile& input) {
  std::vector<PrecisionRow> rows;
  std::vector<TensorStorage> outputs;  // the first stays a reference
  const auto view = [&](const TensorStorage& y) {
    return TensorView(y.data(), DType::kBF16, {input.num_tokens(), checkpoint.shape().hidden_dim});
  };
  for (const Precision precision : kPrecisions) {
    PrecisionRow row{.layer = layer, .precision = precision};
    try {
      outputs.push_back(run_precision(checkpoint, input, row));
      compare(view(outputs.back()),
              input.y_ref().is_given() ? input.y_ref() : view(outputs.front()), row);
    } catch (const Error& error) {
      // What the precision cannot hold; BF16 holds everything.
      if (precision == Precision::kBF16 || error.code() != ErrorCode::kInvalidArgument) throw;
      row.refusal = error.what();
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

bool is_finite(const PrecisionRow& row) {
  const Comparison& found = row.comparison;
  return found.num_one_sided == 0 && (found.num_left_out == 0 || row.worst.token >= 0);
}

std::string json_of(const PrecisionTable& table) {
  Json rows = Json::array();
  for (const PrecisionRow& row : table.rows) {
    Json object{{"layer", row.layer}, {"precision", option_name(row.precision)}};
    if (row.refusal.empty()) {
      object.update({{"rel_l2", row.comparison.rel_l2},
                     {"cosine", row.comparison.cosine},
                     {"max_abs", row.comparison.max_abs},
                     {"left_out", row.comparison.num_left_out},
                     {"one_sided", row.comparison.num_one_sided},
                     {"weight_bytes", row.weight_bytes},
                     {"worst_token", row.worst.token},
                     {"worst_rel_l2", row.worst.rel_l2}});
    } else {
      object["refusal"] = row.refusal;
    }
    rows.push_back(std::move(object));
  }
  const Json object{{"checkpoint", table.checkpoint},
                    {"architecture", table.architecture},
                    {"reference", table.has_reference ? "y_ref" : "bf16"},
                    {"rows", std::move(rows)}};
  return object.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
}

std::string text_of(const PrecisionTable& table) {
  std::ostringstream text;
  text << "checkpoint  " << table.checkpoint << " (" << table.architecture << ")\n"
       << "reference   "
       << (table.has_reference ? "y_ref of the input" : "bf16, where the input has no y_ref")
       << "\n\n"
       << "layer  precision  relative L2  cosine       weights (B)  worst row (token)\n";
  for (const PrecisionRow& row : table.rows) {
    text << std::setw(5) << row.layer << "  " << std::left << std::setw(9)
         << option_name(row.precision) << "  ";
    if (row.refusal.empty()) {
      text << std::setw(11) << distance_text(row.comparison.rel_l2) << "  " << std::setw(11)
           << std::setprecision(9) << row.comparison.cosine << "  " << std::setw(11)
           << row.weight_bytes << "  " << worst_text(row.worst);
      const std::string not_finite = not_finite_text(row.comparison);
      if (!not_finite.empty()) text << "; NaN or infinite: " << not_finite;
      text << '\n';
    } else {
      text << "cannot hold the layer: " << row.refusal << "\n";
    }
    text << std::right;
  }
  return text.str();
}

}  // namespace distmoe::tools
