// SPDX-License-Identifier: Apache-2.0
//
// Weights quantised ahead of the calls that use them.
#include "distmoe/prepared_weight.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "core/allocate_array.hpp"
#include "core/check.hpp"
#include "core/checked_math.hpp"
#include "core/current_error.hpp"
#include "core/float_environment.hpp"
#include "formats/block_format.hpp"
#include "formats/mxfp4.hpp"
#include "formats/mxfp8.hpp"
#include "formats/nvfp4.hpp"
#include "runtime/prepared_layout.hpp"

namespace distmoe {
namespace {

/// A prepared weight starts its arrays at multiples of this many bytes, as regions of a context do.
constexpr std::int64_t kAlignment = kRegionAlignment;

/// Of errors.
constexpr const char* kPreparing = "preparing a weight";

/// One of the matrices [rows, K] that an expert's weight is made of, with the rows of codes that
/// are its own.
struct MatrixPart {
  BF16Rows values;
  std::int64_t first_row = 0;
  std::int64_t row_step = 1;
};

struct WeightSize {
  std::int64_t num_experts = 0;
  std::int64_t num_rows = 0;
  std::int64_t num_columns = 0;
};

bool has_halves(const TensorView& weight) { return weight.rank == 4; }

WeightSize check_weight(const TensorView& weight, const BlockScaledConfig& config) {
  DISTMOE_CHECK(weight.rank == 3 || (has_halves(weight) && weight.shape[1] == 2), kInvalidArgument,
                "a weight to prepare must have shape [L, N, K] or [L, 2, F, D], got ",
                weight.describe());
  DISTMOE_CHECK(!has_halves(weight) || config.gate_up_layout == GateUpLayout::kConcatenated,
                kInvalidArgument,
                "a weight of shape [L, 2, F, D] names its halves; interleaved weights are "
                "[L, 2F, D]");
  DISTMOE_CHECK(weight.dtype == DType::kBF16, kInvalidArgument,
                "a weight to prepare must be bf16, got ", weight.describe());
  DISTMOE_CHECK(weight.device == Device{}, kInvalidArgument,
                "a weight to prepare must be in host memory, got ", weight.describe());
  const int last = weight.rank - 1;
  DISTMOE_CHECK(weight.num_elements() == 0 ||
                    (weight.data != nullptr &&
                     reinterpret_cast<std::uintptr_t>(weight.data) % sizeof(BF16) == 0),
                kInvalidArgument, "a weight to prepare must lie at a multiple of 2 bytes, got ",
                weight.describe(), " at ", weight.data);
  DISTMOE_CHECK(weight.shape[last] <= 1 || weight.strides[last] == 1, kInvalidArgument,
                "a weight to prepare needs stride 1 in its last dimension, got ",
                weight.describe());
  // A tile lies in one half.
  const bool has_tiles = config.format == Precision::kMXFP8 && !config.inference;
  DISTMOE_CHECK(!has_halves(weight) || !has_tiles || weight.shape[2] % kMxfp8BlockSize == 0,
                kInvalidArgument, "a weight to prepare has halves of ", weight.shape[2],
                " rows; mxfp8 training needs a multiple of ", kMxfp8BlockSize);
  return {.num_experts = weight.shape[0],
          .num_rows = has_halves(weight) ? checked_mul(2, weight.shape[2]) : weight.shape[1],
          .num_columns = weight.shape[last]};
}

/// Rows that share no tile with others: gate and up apart where they alternate, or may have a gap
/// between them.
// NOTE: no vector: a refill that has begun cannot fail.
class MatrixParts {
 public:
  explicit MatrixParts(const MatrixPart& whole) : parts_{whole}, size_(1) {}
  MatrixParts(const MatrixPart& gate, const MatrixPart& up) : parts_{gate, up}, size_(2) {}
  const MatrixPart* begin() const { return parts_.data(); }
  const MatrixPart* end() const { return parts_.data() + size_; }

 private:
  std::array<MatrixPart, 2> parts_;
  std::size_t size_;
};

MatrixParts parts_of(const TensorView& weight, const BlockScaledConfig& config,
                     std::int64_t expert) {
  const int row_dim = weight.rank - 2;
  const std::int64_t columns = weight.shape[weight.rank - 1];
  const std::int64_t stride = weight.strides[row_dim];
  const BF16* data = static_cast<const BF16*>(weight.data) + expert * weight.strides[0];
  const std::int64_t rows = weight.shape[row_dim];
  if (has_halves(weight)) {
    return {MatrixPart{{data, rows, columns, stride}, 0, 1},
            MatrixPart{{data + weight.strides[1], rows, columns, stride}, rows, 1}};
  }
  if (config.gate_up_layout == GateUpLayout::kInterleaved) {
    return {MatrixPart{{data, rows / 2, columns, 2 * stride}, 0, 2},
            MatrixPart{{data + stride, rows / 2, columns, 2 * stride}, 1, 2}};
  }
  return MatrixParts(MatrixPart{{data, rows, columns, stride}, 0, 1});
}

/// The largest of the parts', by its bits, so that NaN is above infinity.
float expert_amax(const MatrixParts& parts) {
  float amax = 0.0F;
  for (const MatrixPart& part : parts) {
    amax = std::bit_cast<float>(std::max(std::bit_cast<std::uint32_t>(amax),
                                         std::bit_cast<std::uint32_t>(amax_of(part.values))));
  }
  return amax;
}

/// Where the codes and scales of a part go.
template <typename Code, typename Scale>
BlockScaledView<Code, Scale> place_of(const PreparedWeightView& out, std::int64_t expert,
                                      const MatrixPart& part, std::int64_t rows_per_scale) {
  const std::int64_t code_stride = out.codes.strides[1];
  const std::int64_t scale_stride = out.scales.strides[1];
  // Interleaved tiles alternate as rows do; elsewhere a part begins at a tile.
  const std::int64_t first_scale_row =
      part.row_step > 1 ? part.first_row : part.first_row / rows_per_scale;
  return {static_cast<Code*>(out.codes.data) + expert * out.codes.strides[0] +
              part.first_row * code_stride,
          static_cast<Scale*>(out.scales.data) + expert * out.scales.strides[0] +
              first_scale_row * scale_stride,
          part.row_step * code_stride, part.row_step * scale_stride};
}

void quantise_expert(const MatrixParts& parts, const PreparedWeightView& out, std::int64_t expert) {
  const float amax = out.config.format == Precision::kNVFP4 ? expert_amax(parts) : 0.0F;
  for (const MatrixPart& part : parts) {
    switch (out.config.format) {
      case Precision::kMXFP8:
        if (out.config.inference) {
          quantise_mxfp8_rows(part.values, place_of<E4M3, E8M0>(out, expert, part, 1));
        } else {
          quantise_mxfp8_tiles(part.values,
                               place_of<E4M3, E8M0>(out, expert, part, kMxfp8BlockSize));
        }
        break;
      case Precision::kMXFP4:
        quantise_mxfp4(part.values, place_of<std::uint8_t, E8M0>(out, expert, part, 1));
        break;
      default: {
        const float factor = quantise_nvfp4_expert(
            part.values, amax, place_of<std::uint8_t, E4M3>(out, expert, part, 1));
        float* factors =
            static_cast<float*>(out.global_scales.data) + expert * out.global_scales.strides[0];
        for (std::int64_t i = 0; i < out.global_scales.shape[1]; ++i) {
          factors[i * out.global_scales.strides[1]] = 1.0F / factor;
        }
      }
    }
  }
}

void quantise(const TensorView& weight, const PreparedWeightView& out) {
  if (weight.num_elements() == 0) return;
  for (std::int64_t expert = 0; expert < weight.shape[0]; ++expert) {
    quantise_expert(parts_of(weight, out.config, expert), out, expert);
  }
}

void check_host_memory(const PreparedWeightView& weight) {
  for (const TensorView* array : {&weight.codes, &weight.scales, &weight.global_scales}) {
    DISTMOE_CHECK(!array->is_given() || array->device == Device{}, kInvalidArgument,
                  "the prepared weight must be in host memory, got ", array->describe());
  }
}

}  // namespace

PreparedWeight::PreparedWeight() noexcept = default;
PreparedWeight::PreparedWeight(PreparedWeight&& other) noexcept
    : view_(std::exchange(other.view_, {})), memory_(std::move(other.memory_)) {}
PreparedWeight& PreparedWeight::operator=(PreparedWeight&& other) noexcept {
  view_ = std::exchange(other.view_, {});
  memory_ = std::move(other.memory_);
  return *this;
}
PreparedWeight::~PreparedWeight() = default;

PreparedWeight::PreparedWeight(const BlockScaledConfig& config, std::int64_t num_experts,
                               std::int64_t num_rows, std::int64_t num_columns)
    : view_(only_errors(kPreparing, [&] {
        return prepared_layout(config, num_experts, num_rows, num_columns);
      })) {
  std::int64_t end = 0;
  std::array<std::int64_t, 3> begins{};
  const std::array<TensorView*, 3> arrays{&view_.codes, &view_.scales, &view_.global_scales};
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    begins[i] = end;
    const auto bytes = static_cast<std::int64_t>(arrays[i]->num_bytes());
    end = checked_add(end, align_up(bytes));
  }
  // NOTE: not filled: codes and scales are written once, by whoever prepares.
  memory_ = allocate_array<std::byte>(checked_add(end, kAlignment), "a prepared weight");
  const auto address = reinterpret_cast<std::uintptr_t>(memory_.get());
  std::byte* base = memory_.get() + (kAlignment - address % kAlignment) % kAlignment;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    if (arrays[i]->is_given()) arrays[i]->data = base + begins[i];
  }
  view_.has_known_scales = true;
}

std::size_t PreparedWeight::num_bytes() const noexcept {
  return view_.codes.num_bytes() + view_.scales.num_bytes() + view_.global_scales.num_bytes();
}

PreparedWeight prepare_block_scaled_weight(const TensorView& weight,
                                           const BlockScaledConfig& config) {
  const DefaultFloatEnvironment environment;
  return only_errors(kPreparing, [&] {
    const WeightSize size = check_weight(weight, config);
    PreparedWeight prepared(config, size.num_experts, size.num_rows, size.num_columns);
    quantise(weight, prepared.view());
    return prepared;
  });
}

void refill_prepared_weight(const TensorView& weight, const PreparedWeightView& out) {
  const DefaultFloatEnvironment environment;
  only_errors(kPreparing, [&] {
    const WeightSize size = check_weight(weight, out.config);
    check_prepared_layout("the prepared weight", out, size.num_experts, size.num_rows,
                          size.num_columns);
    check_host_memory(out);
    quantise(weight, out);
  });
}

void check_scales(const PreparedWeightView& weight) {
  only_errors("the check of a prepared weight", [&] {
    const TensorView& codes = weight.codes;
    DISTMOE_CHECK(codes.rank == 3, kInvalidArgument, "the codes of a prepared weight are ",
                  codes.describe(), "; legal are three dimensions");
    const std::int64_t columns =
        codes.shape[2] * block_format_of(weight.config.format).codes_per_byte;
    check_prepared_layout("the prepared weight", weight, codes.shape[0], codes.shape[1], columns);
    check_host_memory(weight);
    check_global_scales("the prepared weight", weight);
    check_block_scales("the prepared weight", weight);
  });
}

}  // namespace distmoe
