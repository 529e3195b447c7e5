// SPDX-License-Identifier: Apache-2.0
//
// One set of expert weights, written in every spelling that checkpoints use. All values are E2M1
// numbers times a power of two, so that BF16, FP8 and MXFP4 hold the same weights exactly.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "distmoe/tensor.hpp"
#include "formats/bf16.hpp"
#include "formats/e2m1.hpp"
#include "formats/e4m3.hpp"
#include "io/safetensors_writer.hpp"
#include "io/temporary_directory.hpp"

namespace distmoe::testing {

struct OwnedTensor {
  std::string name;
  DType dtype = DType::kBF16;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> data;
};

template <typename T>
OwnedTensor make_tensor(std::string name, DType dtype, std::vector<std::int64_t> shape,
                        const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {std::move(name), dtype, std::move(shape), {bytes.begin(), bytes.end()}};
}

inline void write_tensors(const std::filesystem::path& path, std::span<const OwnedTensor> tensors,
                          const Metadata& metadata = {}) {
  std::vector<TensorEntry> entries;
  entries.reserve(tensors.size());
  for (const OwnedTensor& tensor : tensors) {
    entries.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  SafetensorsWriter writer(path, entries, metadata);
  for (const OwnedTensor& tensor : tensors) writer.append(tensor.data);
  writer.commit();
}

struct TinyModel {
  std::int64_t num_experts = 5;
  std::int64_t d = 64;
  std::int64_t f = 32;

  static constexpr int kGate = 0;
  static constexpr int kUp = 1;
  static constexpr int kDown = 2;

  std::int64_t rows(int role) const { return role == kDown ? d : f; }
  std::int64_t cols(int role) const { return role == kDown ? f : d; }

  static std::uint32_t hash(std::int64_t layer, std::int64_t expert, int role, std::int64_t row,
                            std::int64_t col) {
    std::uint64_t h = 0x9E3779B97F4A7C15u;
    for (const std::int64_t part : {layer, expert, std::int64_t{role}, row, col}) {
      h = (h ^ static_cast<std::uint64_t>(part)) * 0xBF58476D1CE4E5B9u;
      h ^= h >> 29;
    }
    return static_cast<std::uint32_t>(h >> 32);
  }
  /// MXFP4: a scale for 32 elements of a row.
  static int exponent(std::int64_t layer, std::int64_t expert, int role, std::int64_t row,
                      std::int64_t col) {
    return static_cast<int>(hash(layer, expert, role, row, -1 - col / 32) % 3) - 1;
  }
  static E2M1 code(std::int64_t layer, std::int64_t expert, int role, std::int64_t row,
                   std::int64_t col) {
    return E2M1{static_cast<std::uint8_t>(hash(layer, expert, role, row, col) % 16)};
  }
  static float weight(std::int64_t layer, std::int64_t expert, int role, std::int64_t row,
                      std::int64_t col) {
    return std::ldexp(to_float(code(layer, expert, role, row, col)),
                      exponent(layer, expert, role, row, col));
  }
  static float bias13(std::int64_t layer, std::int64_t expert, std::int64_t row) {
    return static_cast<float>(layer * 64 + expert * 8) + static_cast<float>(row) / 64;
  }
  static float bias2(std::int64_t layer, std::int64_t expert, std::int64_t row) {
    return -bias13(layer, expert, row) - 1;
  }

  std::vector<BF16> matrix(std::int64_t layer, std::int64_t expert, int role) const {
    std::vector<BF16> values;
    for (std::int64_t row = 0; row < rows(role); ++row) {
      for (std::int64_t col = 0; col < cols(role); ++col) {
        values.push_back(to_bf16(weight(layer, expert, role, row, col)));
      }
    }
    return values;
  }

  /// What a loader must give: gate rows, then up rows, of each expert.
  std::vector<BF16> w13(std::int64_t layer, std::int64_t first, std::int64_t count) const {
    std::vector<BF16> all;
    for (std::int64_t expert = first; expert < first + count; ++expert) {
      for (const int role : {kGate, kUp}) {
        const std::vector<BF16> part = matrix(layer, expert, role);
        all.insert(all.end(), part.begin(), part.end());
      }
    }
    return all;
  }
  std::vector<BF16> w2(std::int64_t layer, std::int64_t first, std::int64_t count) const {
    std::vector<BF16> all;
    for (std::int64_t expert = first; expert < first + count; ++expert) {
      const std::vector<BF16> part = matrix(layer, expert, kDown);
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }

  using Names = std::function<std::string(std::int64_t layer, std::int64_t expert, int role)>;

  static std::string projection_name(std::int64_t layer, std::int64_t expert, int role) {
    const char* suffix[] = {"gate_proj", "up_proj", "down_proj"};
    return "model.layers." + std::to_string(layer) + ".mlp.experts." + std::to_string(expert) +
           "." + suffix[role] + ".weight";
  }
  static std::string mixtral_name(std::int64_t layer, std::int64_t expert, int role) {
    const char* suffix[] = {"w1", "w3", "w2"};
    return "model.layers." + std::to_string(layer) + ".block_sparse_moe.experts." +
           std::to_string(expert) + "." + suffix[role] + ".weight";
  }

  std::vector<OwnedTensor> per_expert(std::int64_t layer, const Names& name) const {
    std::vector<OwnedTensor> tensors;
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
      for (const int role : {kGate, kUp, kDown}) {
        tensors.push_back(make_tensor(name(layer, expert, role), DType::kBF16,
                                      {rows(role), cols(role)}, matrix(layer, expert, role)));
      }
    }
    return tensors;
  }

  /// The scale of an FP8 block; distinct for its neighbours.
  static float fp8_scale(std::int64_t block_row, std::int64_t block_col) {
    return std::ldexp(1.0f, static_cast<int>((block_row * 3 + block_col) % 5) - 2);
  }

  std::vector<OwnedTensor> fp8(std::int64_t layer, DType scale_dtype = DType::kF32) const {
    std::vector<OwnedTensor> tensors;
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
      for (const int role : {kGate, kUp, kDown}) {
        std::vector<E4M3> codes;
        for (std::int64_t row = 0; row < rows(role); ++row) {
          for (std::int64_t col = 0; col < cols(role); ++col) {
            codes.push_back(
                to_e4m3(weight(layer, expert, role, row, col) / fp8_scale(row / 128, col / 128)));
          }
        }
        const std::int64_t block_rows = (rows(role) + 127) / 128;
        const std::int64_t block_cols = (cols(role) + 127) / 128;
        std::vector<float> scales;
        std::vector<BF16> narrow_scales;
        for (std::int64_t i = 0; i < block_rows * block_cols; ++i) {
          scales.push_back(fp8_scale(i / block_cols, i % block_cols));
          narrow_scales.push_back(to_bf16(scales.back()));
        }
        const std::string name = projection_name(layer, expert, role);
        const std::vector<std::int64_t> blocks = {block_rows, block_cols};
        tensors.push_back(make_tensor(name, DType::kF8E4M3, {rows(role), cols(role)}, codes));
        tensors.push_back(
            scale_dtype == DType::kF32
                ? make_tensor(name + "_scale_inv", scale_dtype, blocks, scales)
                : make_tensor(name + "_scale_inv", scale_dtype, blocks, narrow_scales));
      }
    }
    return tensors;
  }

  /// Bytes of one role's rows: a code for every element, or for every second one two of 4 bits.
  template <typename CodeOf>
  std::vector<std::uint8_t> code_bytes(int role, std::int64_t step, CodeOf code_of) const {
    std::vector<std::uint8_t> bytes;
    for (std::int64_t row = 0; row < rows(role); ++row) {
      for (std::int64_t col = 0; col < cols(role); col += step) {
        bytes.push_back(code_of(row, col));
      }
    }
    return bytes;
  }
  std::vector<std::uint8_t> fp4_codes(std::int64_t layer, std::int64_t expert, int role) const {
    return code_bytes(role, 2, [&](std::int64_t row, std::int64_t col) {
      return pack_e2m1(code(layer, expert, role, row, col),
                       code(layer, expert, role, row, col + 1));
    });
  }
  std::vector<std::uint8_t> power_scales(std::int64_t layer, std::int64_t expert, int role) const {
    return code_bytes(role, 32, [&](std::int64_t row, std::int64_t col) {
      return static_cast<std::uint8_t>(127 + exponent(layer, expert, role, row, col));
    });
  }
  std::vector<std::uint8_t> mxfp8_codes(std::int64_t layer, std::int64_t expert, int role) const {
    return code_bytes(role, 1, [&](std::int64_t row, std::int64_t col) {
      return to_e4m3(to_float(code(layer, expert, role, row, col))).bits;
    });
  }
  /// Block scales are 2^3 times larger and the global scale gives it back, twice as much of it in
  /// the up rows.
  static float nvfp4_global_scale(int role) { return role == kUp ? 0x1p-4f : 0x1p-3f; }
  std::vector<std::uint8_t> nvfp4_scales(std::int64_t layer, std::int64_t expert, int role) const {
    return code_bytes(role, 16, [&](std::int64_t row, std::int64_t col) {
      const float power = std::ldexp(1.0f, exponent(layer, expert, role, row, col));
      return to_e4m3(power / nvfp4_global_scale(role)).bits;
    });
  }

  /// Per-expert tensors with block scales. `scale_dtype` of MXFP8 and MXFP4 is U8 or E8M0.
  std::vector<OwnedTensor> block_scaled(std::int64_t layer, const std::string& format,
                                        DType scale_dtype = DType::kU8,
                                        bool has_input_scale = false) const {
    std::vector<OwnedTensor> tensors;
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
      for (const int role : {kGate, kUp, kDown}) {
        const std::string name = projection_name(layer, expert, role);
        const std::int64_t n = rows(role);
        const std::int64_t k = cols(role);
        if (format == "mxfp8") {
          tensors.push_back(
              make_tensor(name, DType::kF8E4M3, {n, k}, mxfp8_codes(layer, expert, role)));
        } else {
          tensors.push_back(
              make_tensor(name, DType::kU8, {n, k / 2}, fp4_codes(layer, expert, role)));
        }
        if (format != "nvfp4") {
          tensors.push_back(make_tensor(name + "_scale", scale_dtype, {n, k / 32},
                                        power_scales(layer, expert, role)));
          continue;
        }
        tensors.push_back(make_tensor(name + "_scale", DType::kF8E4M3, {n, k / 16},
                                      nvfp4_scales(layer, expert, role)));
        const std::vector<float> global = {nvfp4_global_scale(role)};
        tensors.push_back(make_tensor(name + "_scale_2", DType::kF32, {}, global));
        if (!has_input_scale) continue;
        const std::string input = name.substr(0, name.rfind('.')) + ".input_scale";
        tensors.push_back(make_tensor(input, DType::kF32, {}, std::vector<float>{0.25f}));
      }
    }
    return tensors;
  }
  /// What config.json says of them, beginning with a comma.
  static std::string quantization(const std::string& format) {
    if (format == "mxfp4") return R"(,"quantization_config":{"quant_method":"mxfp4"})";
    const char* algorithm = format == "mxfp8" ? "MXFP8" : "NVFP4";
    return std::string(R"(,"quantization_config":{"quant_method":"modelopt","quant_algo":")") +
           algorithm + R"("})";
  }

  static std::string fused_name(std::int64_t layer, const std::string& suffix,
                                const std::string& block = "mlp") {
    return "model.layers." + std::to_string(layer) + "." + block + ".experts." + suffix;
  }

  std::vector<OwnedTensor> fused(std::int64_t layer, const std::string& block = "mlp") const {
    return {make_tensor(fused_name(layer, "gate_up_proj", block), DType::kBF16,
                        {num_experts, 2 * f, d}, w13(layer, 0, num_experts)),
            make_tensor(fused_name(layer, "down_proj", block), DType::kBF16, {num_experts, d, f},
                        w2(layer, 0, num_experts))};
  }

  /// gpt-oss interleaves gate and up: row i is of role i % 2.
  std::vector<OwnedTensor> gpt_oss_biases(std::int64_t layer, DType dtype) const {
    std::vector<float> b13;
    std::vector<float> b2;
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
      for (std::int64_t i = 0; i < 2 * f; ++i) {
        b13.push_back(bias13(layer, expert, i / 2 + (i % 2) * f));
      }
      for (std::int64_t row = 0; row < d; ++row) b2.push_back(bias2(layer, expert, row));
    }
    const auto make = [&](const char* suffix, std::int64_t width,
                          const std::vector<float>& values) {
      const std::string name = fused_name(layer, suffix);
      if (dtype == DType::kF32) return make_tensor(name, dtype, {num_experts, width}, values);
      std::vector<BF16> narrow;
      narrow.reserve(values.size());
      for (const float value : values) narrow.push_back(to_bf16(value));
      return make_tensor(name, dtype, {num_experts, width}, narrow);
    };
    return {make("gate_up_proj_bias", 2 * f, b13), make("down_proj_bias", d, b2)};
  }

  std::vector<OwnedTensor> gpt_oss(std::int64_t layer, DType bias_dtype = DType::kBF16) const {
    std::vector<BF16> gate_up;
    std::vector<BF16> down;
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
      for (std::int64_t col = 0; col < d; ++col) {
        for (std::int64_t i = 0; i < 2 * f; ++i) {
          gate_up.push_back(to_bf16(weight(layer, expert, static_cast<int>(i % 2), i / 2, col)));
        }
      }
      for (std::int64_t col = 0; col < f; ++col) {
        for (std::int64_t row = 0; row < d; ++row) {
          down.push_back(to_bf16(weight(layer, expert, kDown, row, col)));
        }
      }
    }
    std::vector<OwnedTensor> tensors = gpt_oss_biases(layer, bias_dtype);
    tensors.push_back(make_tensor(fused_name(layer, "gate_up_proj"), DType::kBF16,
                                  {num_experts, d, 2 * f}, gate_up));
    tensors.push_back(
        make_tensor(fused_name(layer, "down_proj"), DType::kBF16, {num_experts, f, d}, down));
    return tensors;
  }

  std::vector<OwnedTensor> mxfp4(std::int64_t layer) const {
    std::vector<std::uint8_t> blocks[2];
    std::vector<std::uint8_t> scales[2];
    const auto append = [&](int fused, std::int64_t expert, int role, std::int64_t row) {
      for (std::int64_t col = 0; col < cols(role); col += 2) {
        blocks[fused].push_back(pack_e2m1(code(layer, expert, role, row, col),
                                          code(layer, expert, role, row, col + 1)));
      }
      for (std::int64_t col = 0; col < cols(role); col += 32) {
        scales[fused].push_back(
            static_cast<std::uint8_t>(127 + exponent(layer, expert, role, row, col)));
      }
    };
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
      for (std::int64_t i = 0; i < 2 * f; ++i) append(0, expert, static_cast<int>(i % 2), i / 2);
      for (std::int64_t row = 0; row < d; ++row) append(1, expert, kDown, row);
    }
    std::vector<OwnedTensor> tensors = gpt_oss_biases(layer, DType::kBF16);
    const auto add = [&](const char* suffix, std::vector<std::int64_t> shape,
                         const std::vector<std::uint8_t>& values) {
      tensors.push_back(
          make_tensor(fused_name(layer, suffix), DType::kU8, std::move(shape), values));
    };
    add("gate_up_proj_blocks", {num_experts, 2 * f, d / 32, 16}, blocks[0]);
    add("gate_up_proj_scales", {num_experts, 2 * f, d / 32}, scales[0]);
    add("down_proj_blocks", {num_experts, d, f / 32, 16}, blocks[1]);
    add("down_proj_scales", {num_experts, d, f / 32}, scales[1]);
    return tensors;
  }

  /// `extra` is more of the JSON object, beginning with a comma.
  std::string config(const std::string& architecture, int num_layers,
                     const std::string& extra = "") const {
    const bool is_moe_key =
        architecture == "Qwen3MoeForCausalLM" || architecture == "DeepseekV3ForCausalLM";
    return R"({"architectures":[")" + architecture + R"("],"hidden_act":"silu","hidden_size":)" +
           std::to_string(d) + R"(,"intermediate_size":)" + std::to_string(is_moe_key ? 3 * f : f) +
           R"(,"moe_intermediate_size":)" + std::to_string(is_moe_key ? f : 3 * f) +
           R"(,"num_local_experts":)" + std::to_string(num_experts) +
           R"(,"num_experts_per_tok":2,"num_hidden_layers":)" + std::to_string(num_layers) + extra +
           "}";
  }

  /// config.json and model.safetensors with these tensors.
  void write(const TemporaryDirectory& directory, const std::string& architecture,
             std::span<const OwnedTensor> tensors, const std::string& extra = "",
             int num_layers = 1) const {
    write_file(directory / "config.json", config(architecture, num_layers, extra));
    write_tensors(directory / "model.safetensors", tensors);
  }
};

/// Tensors of two lists in one.
inline std::vector<OwnedTensor> operator+(std::vector<OwnedTensor> a,
                                          const std::vector<OwnedTensor>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace distmoe::testing
