// SPDX-License-Identifier: Apache-2.0
//
// A saved forward as a tensor: int64 [1] that holds its number. Operators can return it, graphs
// save it, and the saved forward lives as long as the tensor's memory, whatever becomes of the
// graph.
#include <dlpack/dlpack.h>
#include <nanobind/stl/shared_ptr.h>

#include <memory>

#include "bindings.hpp"
#include "context_object.hpp"
#include "errors.hpp"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace distmoe::python {
namespace {

/// The memory of such a tensor. Its deleter runs in any thread, with or without the GIL.
struct NumberTensor {
  DLManagedTensor managed{};
  std::int64_t number = 0;
  std::int64_t extent = 1;
  std::weak_ptr<SharedContext> owner;

  NumberTensor() = default;
  NumberTensor(const NumberTensor&) = delete;
  NumberTensor& operator=(const NumberTensor&) = delete;
  ~NumberTensor() {
    if (const auto shared = owner.lock()) shared->forget(number);
  }
};

nb::object to_capsule(std::unique_ptr<NumberTensor> tensor) {
  DLTensor& fields = tensor->managed.dl_tensor;
  fields.data = &tensor->number;
  fields.device = {kDLCPU, 0};
  fields.ndim = 1;
  fields.dtype = {kDLInt, 64, 1};
  fields.shape = &tensor->extent;
  tensor->managed.manager_ctx = tensor.get();
  tensor->managed.deleter = [](DLManagedTensor* self) {
    delete static_cast<NumberTensor*>(self->manager_ctx);
  };
  const auto destroy_unused = [](PyObject* capsule) {
    if (PyCapsule_IsValid(capsule, "dltensor") == 0) return;
    auto* unused = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
    unused->deleter(unused);
  };
  const nb::object capsule = nb::steal(PyCapsule_New(&tensor->managed, "dltensor", destroy_unused));
  if (!capsule.is_valid()) throw nb::python_error();
  tensor.release();  // NOLINT(bugprone-unused-return-value): the capsule's
  return capsule;
}

}  // namespace

void bind_saved_tensor(nb::module_& module) {
  module.def(
      "saved_tensor",
      [](const ContextObject& context, std::shared_ptr<HeldForward> saved) {
        auto tensor = std::make_unique<NumberTensor>();
        tensor->owner = context.shared;
        tensor->number = context.shared->keep(std::move(saved));
        return to_capsule(std::move(tensor));
      },
      "context"_a, "saved"_a,
      "A DLPack capsule of an int64 tensor with the number of `saved`, which lives as long as it.");
  module.def(
      "saved_of_number",
      [](const ContextObject& context, std::int64_t number) {
        auto saved = context.shared->find(number);
        if (saved == nullptr) {
          throw Error(ErrorCode::kInvalidArgument,
                      concat("no saved forward of this context has number ", number,
                             ": what named it was dropped, or belongs to another context"));
        }
        return saved;
      },
      "context"_a, "number"_a);
  module.def(
      "expect_drop",
      [](const ContextObject& context, std::int64_t number) {
        if (const auto saved = context.shared->find(number)) saved->is_expendable = true;
      },
      "context"_a, "number"_a,
      "The saved forward may be dropped without its backward: it is discarded then.");
}

}  // namespace distmoe::python
