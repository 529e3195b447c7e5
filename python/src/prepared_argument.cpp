// SPDX-License-Identifier: Apache-2.0
#include "prepared_argument.hpp"

#include <nanobind/stl/string.h>

#include <memory>
#include <string>
#include <utility>

#include "config_argument.hpp"
#include "owned_array.hpp"
#include "refuse_copies.hpp"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace distmoe::python {
namespace {

BlockScaledConfig block_scaled_config(const std::string& format, bool inference,
                                      const std::string& gate_up_layout) {
  return {.format = choice_of<Precision>("format", format),
          .inference = inference,
          .gate_up_layout = choice_of<GateUpLayout>("gate_up_layout", gate_up_layout)};
}

PreparedObject prepare(nb::handle weight, const std::string& format, bool inference,
                       const std::string& gate_up_layout) {
  const TensorArgument tensor("weight", weight, Access::kRead, 0);
  const BlockScaledConfig config = block_scaled_config(format, inference, gate_up_layout);
  std::unique_ptr<PreparedWeight> prepared;
  {
    const nb::gil_scoped_release release;
    prepared = std::make_unique<PreparedWeight>(prepare_block_scaled_weight(tensor.view(), config));
  }
  const PreparedWeightView view = prepared->view();
  const nb::capsule owner(prepared.release(), [](void* memory) noexcept {
    delete static_cast<PreparedWeight*>(memory);
  });
  return {config, array_of(view.codes, owner), array_of(view.scales, owner),
          array_of(view.global_scales, owner), view.has_known_scales};
}

void refill(nb::handle weight, PreparedObject& out) {
  const TensorArgument tensor("weight", weight, Access::kRead, 0);
  const PreparedArgument argument("out", out, Access::kWritten, 0);
  {
    const nb::gil_scoped_release release;
    refill_prepared_weight(tensor.view(), argument.view());
  }
  out.has_known_scales = true;
}

/// What the bits of an array of `config` are.
DType code_type(const BlockScaledConfig& config) {
  return config.format == Precision::kMXFP8 ? DType::kF8E4M3 : DType::kU8;
}

DType scale_type(const BlockScaledConfig& config) {
  return config.format == Precision::kNVFP4 ? DType::kF8E4M3 : DType::kF8E8M0;
}

}  // namespace

PreparedArgument::PreparedArgument(const char* name, const PreparedObject& weight, Access access,
                                   std::uintptr_t stream)
    : codes_(name, weight.codes, access, stream),
      scales_(name, weight.scales, access, stream),
      global_scales_(name, weight.global_scales, access, stream, true) {
  const std::string prefix(name);
  view_ = {.config = weight.config,
           .codes = as_bits(prefix + ".codes", codes_.view(), code_type(weight.config)),
           .scales = as_bits(prefix + ".scales", scales_.view(), scale_type(weight.config)),
           .global_scales = global_scales_.view(),
           .has_known_scales = weight.has_known_scales};
}

WeightArgument::WeightArgument(const char* name, nb::handle weight, std::uintptr_t stream) {
  PreparedObject* prepared = nullptr;
  if (nb::try_cast(weight, prepared) && prepared != nullptr) {
    prepared_.emplace(name, *prepared, Access::kRead, stream);
  } else {
    tensor_.emplace(name, weight, Access::kRead, stream);
  }
}

void bind_prepared_weight(nb::module_& module) {
  nb::class_<PreparedObject> type(
      module, "PreparedWeight",
      "A weight [L, N, K] as codes and block scales, in the layouts of "
      "docs/formats.md: tensors of their bits (uint8; global scales FP32). "
      "Takes the place of w13 or w2 in every call of a context of its format. Calls refuse a NaN "
      "scale unless `has_known_scales`, as what was prepared has: there it is that of a NaN "
      "weight.");
  refuse_copies(type,
                "its memory may be that of others; copy its tensors and make another of them");
  type.def(
          "__init__",
          [](PreparedObject* self, const std::string& format, nb::object codes, nb::object scales,
             nb::object global_scales, bool inference, const std::string& gate_up_layout,
             bool has_known_scales) {
            new (self) PreparedObject{block_scaled_config(format, inference, gate_up_layout),
                                      std::move(codes), std::move(scales), std::move(global_scales),
                                      has_known_scales};
          },
          "format"_a, "codes"_a, "scales"_a, "global_scales"_a.none() = nb::none(), nb::kw_only(),
          "inference"_a = false, "gate_up_layout"_a = "concatenated", "has_known_scales"_a = false)
      .def_ro("codes", &PreparedObject::codes)
      .def_ro("scales", &PreparedObject::scales)
      .def_ro("global_scales", &PreparedObject::global_scales)
      .def_ro("has_known_scales", &PreparedObject::has_known_scales)
      .def_prop_ro("format",
                   [](const PreparedObject& self) { return option_name(self.config.format); })
      .def_prop_ro("inference", [](const PreparedObject& self) { return self.config.inference; })
      .def_prop_ro("gate_up_layout", [](const PreparedObject& self) {
        return option_name(self.config.gate_up_layout);
      });
  module.def(
      "prepare_block_scaled_weight", &prepare, "weight"_a, "format"_a, nb::kw_only(),
      "inference"_a = false, "gate_up_layout"_a = "concatenated",
      "Quantises a BF16 weight [L, N, K] (W13 also as [L, 2, F, D]) in host memory. Its bits "
      "are those with which a context of `format` computes that is given the BF16 weight.");
  module.def("refill_prepared_weight", &refill, "weight"_a, "out"_a,
             "The same into memory that is there, whose addresses stay.");
  module.def(
      "check_scales",
      [](PreparedObject& weight) {
        const PreparedArgument argument("weight", weight, Access::kRead, 0);
        check_scales(argument.view());
        weight.has_known_scales = true;
      },
      "weight"_a,
      "Raises InvalidArgumentError for a scale that is NaN, of a weight that comes from elsewhere. "
      "Calls do so too until this has looked at the weight once.");
}

}  // namespace distmoe::python
