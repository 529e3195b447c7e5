// SPDX-License-Identifier: Apache-2.0
#include "call_arguments.hpp"

#include <nanobind/stl/string.h>

#include "errors.hpp"
#include "object_fields.hpp"

namespace nb = nanobind;

namespace distmoe::python {
namespace {

nb::object gamma_of(nb::handle norm_object) {
  if (norm_object.is_none()) return nb::none();
  const nb::object expected = nb::module_::import_("distmoe.norm").attr("PostExpertNorm");
  if (!nb::isinstance(norm_object, expected)) {
    throw_wrong_type("norm", norm_object, "a PostExpertNorm or None");
  }
  return norm_object.attr("gamma");
}

}  // namespace

OptionArguments::OptionArguments(nb::handle norm_object, nb::handle clip_counts, nb::handle limit,
                                 std::uintptr_t stream)
    : gamma("norm.gamma", gamma_of(norm_object), Access::kRead, stream, true),
      counts("clip_counts", clip_counts, Access::kWritten, stream, true),
      stream(stream) {
  Fields::read_value("clip_limit", limit, clip_limit);
  if (norm_object.is_none()) return;
  const Fields fields(norm_object, "norm.");
  norm.emplace();
  norm->gamma_D = gamma.view();
  fields.read("eps", norm->eps);
  fields.read("gain_center", norm->gain_center);
  fields.read("uses_kahan", norm->uses_kahan);
  fields.read("recomputes_rstd", norm->recomputes_rstd);
}

CallOptions OptionArguments::options() const {
  return {.stream = stream_of(stream),
          .norm = norm,
          .clip_statistics = {.counts_3 = counts.view(), .limit = clip_limit}};
}

Accumulation::Accumulation(nb::handle given) {
  if (PyBool_Check(given.ptr())) {
    for (Name& name : names_) name.is_added = nb::cast<bool>(given);
    return;
  }
  for (const nb::handle item : given) add(nb::cast<std::string>(item));
}

WeightGradient Accumulation::destination(std::string_view name,
                                         const TensorArgument& tensor) const {
  for (const Name& known : names_) {
    if (known.text == name) return {tensor.view(), known.is_added};
  }
  return {tensor.view(), false};
}

void Accumulation::add(const std::string& name) {
  for (Name& known : names_) {
    if (known.text != name) continue;
    known.is_added = true;
    return;
  }
  throw Error(ErrorCode::kInvalidArgument,
              concat("accumulate names '", name, "'; legal are w13, w2, bias13, bias2"));
}

HeldForward* saved_of(nb::handle given) {
  HeldForward* saved = nullptr;
  if (nb::try_cast(given, saved) && saved != nullptr) return saved;
  throw_wrong_type("saved", given, "the SavedForward of a saving_routed_experts");
}

}  // namespace distmoe::python
