// SPDX-License-Identifier: Apache-2.0
#include "layer_weights.hpp"

#include "core/check.hpp"

namespace distmoe::tools {
namespace {

/// Whether codes of a format can be those of the precision, nothing rounded.
bool has_codes_of(StoredFormat format, const WeightRequest& request) {
  switch (request.precision) {
    case Precision::kMXFP8:
      return format == StoredFormat::kFp8Blocks ||
             (format == StoredFormat::kMxfp8 && request.inference);
    case Precision::kMXFP4: return format == StoredFormat::kMxfp4 && request.inference;
    case Precision::kNVFP4: return format == StoredFormat::kNvfp4 && request.inference;
    case Precision::kBF16: break;
  }
  return false;
}

}  // namespace

LayerWeights::LayerWeights(const Checkpoint& checkpoint, const WeightRequest& request)
    : has_stored_codes_(load_codes(checkpoint, request)) {
  if (has_stored_codes_) return;
  experts_ = checkpoint.load_experts(request.layer, request.first_expert, request.num_experts);
  if (request.precision == Precision::kBF16) return;
  const BlockScaledConfig config{.format = request.precision, .inference = request.inference};
  const ExpertWeights loaded = experts_.view();
  w13_ = prepare_block_scaled_weight(loaded.w13_L2FD, config);
  experts_.w13 = {};
  w2_ = prepare_block_scaled_weight(loaded.w2_LDF, config);
  experts_.w2 = {};
}

bool LayerWeights::load_codes(const Checkpoint& checkpoint, const WeightRequest& request) {
  const std::optional<StoredFormat> format = checkpoint.stored_format(request.layer);
  if (!format || !has_codes_of(*format, request)) return false;
  try {
    coded_ =
        checkpoint.load_coded_experts(request.layer, request.first_expert, request.num_experts,
                                      request.inference ? BlockShape::kRows : BlockShape::kTiles);
  } catch (const Error& error) {
    // FP8 whose scales are no powers of two, or whose sizes are no multiples of a block.
    if (*format != StoredFormat::kFp8Blocks || error.code() != ErrorCode::kUnsupported) throw;
    return false;
  }
  return true;
}

ExpertWeights LayerWeights::view() const {
  if (has_stored_codes_) return coded_.view();
  ExpertWeights weights = experts_.view();
  if (!w13_.view().is_given()) return weights;
  weights.w13_L2FD = weights.w2_LDF = {};
  weights.prepared_w13 = w13_.view();
  weights.prepared_w2 = w2_.view();
  return weights;
}

std::int64_t LayerWeights::num_bytes() const {
  return coded_.num_bytes() + experts_.num_bytes() +
         static_cast<std::int64_t>(w13_.num_bytes() + w2_.num_bytes());
}

}  // namespace distmoe::tools
