// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "config_argument.hpp"
#include "context_object.hpp"
#include "distmoe/refusal.hpp"
#include "refuse_copies.hpp"
#include "tensor_argument.hpp"
#include "value_class.hpp"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace distmoe::python {
namespace {

/// What a context is made of.
struct Creation {
  Config config;
  ContextOptions options;
};

/// What Python gave as it, or, on every rank of the group, what is wrong with it.
Creation creation_or_refusal(nb::handle config, const std::shared_ptr<Communicator>& communicator,
                             const std::string& backend, int device, int num_threads) {
  const auto tell = [&](const Error& reason) {
    const nb::gil_scoped_release release;
    refuse_context(communicator, reason);
  };
  try {
    return {.config = config_of(config),
            .options = {.backend = choice_of<BackendKind>("backend", backend),
                        .num_threads = num_threads,
                        .device = device}};
  } catch (const Error& error) {
    tell(error);
  } catch (const nb::builtin_exception& raised) {
    try {
      tell({ErrorCode::kInvalidArgument, concat("TypeError: ", raised.what())});
      // NOLINTNEXTLINE(bugprone-empty-catch)
    } catch (const Error&) {  // what is raised is what this rank met, in its own words
    }
    throw;
  }
}

ContextObject create(nb::object config, nb::handle given, const std::string& backend, int device,
                     int num_threads) {
  std::shared_ptr<Communicator> communicator = communicator_of("communicator", given);
  const Creation creation = creation_or_refusal(config, communicator, backend, device, num_threads);
  std::shared_ptr<SharedContext> shared;
  {
    const nb::gil_scoped_release release;
    shared = std::make_shared<SharedContext>(
        Context::create(creation.config, std::move(communicator), creation.options));
  }
  return {std::move(shared), std::move(config)};
}

void bind_facts(nb::module_& module) {
  ValueClass<CallStatistics>(module, "CallStatistics",
                             "Facts of the last call of a context, on this rank.")
      .field("call", &CallStatistics::call, "Counts from 1; 0 before the first.")
      .field("tokens", &CallStatistics::tokens)
      .field("rows_per_rank", &CallStatistics::rows_per_rank)
      .field("rows_per_expert", &CallStatistics::rows_per_expert, "Of every expert of the group.")
      .field("rank_imbalance", &CallStatistics::rank_imbalance,
             "Rows of the busiest rank / mean rows of a rank; 0 without rows.")
      .field("expert_imbalance", &CallStatistics::expert_imbalance, "The same of experts.")
      .field("dropped_routes", &CallStatistics::dropped_routes, "Always 0: distmoe never drops.")
      .field("device_scratch_bytes", &CallStatistics::device_scratch_bytes,
             "That the call's rows take on this rank.")
      .field("host_scratch_bytes", &CallStatistics::host_scratch_bytes)
      .field("slot", &CallStatistics::slot)
      .field("slot_layer", &CallStatistics::slot_layer)
      .field("is_recomputed", &CallStatistics::is_recomputed);
  ValueClass<RegionPeaks>(module, "RegionPeaks",
                          "What calls took of the activation buffer, at most, on this rank.")
      .field("slot_bytes", &RegionPeaks::slot_bytes)
      .field("device_scratch_bytes", &RegionPeaks::device_scratch_bytes)
      .field("host_scratch_bytes", &RegionPeaks::host_scratch_bytes);
  nb::class_<HeldForward> saved(module, "SavedForward", nb::is_weak_referenceable(),
                                "What a saving forward hands to its backward. Dropping it unused "
                                "makes its slot unusable until Context.reset().");
  refuse_copies(saved, "it names what one context keeps in a slot, for one backward");
  saved.def_prop_ro("is_live", [](const HeldForward& self) { return self.saved.is_live(); })
      .def_prop_ro(
          "slot", [](const HeldForward& self) { return self.saved.slot(); },
          "-1 where this is of no forward.")
      .def_prop_ro("slot_layer", [](const HeldForward& self) { return self.saved.slot_layer(); });
}

void bind_slots(nb::class_<ContextObject>& type) {
  type.def(
          "select_activation_slot",
          [](const ContextObject& self, std::int64_t slot, std::int64_t num_moe_layers) {
            self.run(
                [&](Context& context) { context.select_activation_slot(slot, num_moe_layers); });
          },
          "slot"_a, "num_moe_layers"_a,
          "Makes `slot` the one of the saving forwards to come, `num_moe_layers` of them at a "
          "time.")
      .def_prop_ro("selected_activation_slot",
                   [](const ContextObject& self) {
                     return self.shared->context().selected_activation_slot();
                   })
      .def(
          "discard",
          [](const ContextObject& self, HeldForward& forward, std::uintptr_t stream) {
            self.run([&](Context& context) {
              context.discard(std::move(forward.saved), stream_of(stream));
            });
          },
          "saved"_a, nb::kw_only(), "stream"_a = 0,
          "Gives back what `saved` kept, as if its forward had not saved. It must be the last live "
          "one of its slot. All ranks discard alike.")
      .def(
          "reset",
          [](const ContextObject& self) { self.run([](Context& context) { context.reset(); }); },
          "After an aborted schedule: empties all slots and selects slot 0. All ranks reset.")
      .def("region_peaks", [](const ContextObject& self) {
        return self.run([](Context& context) { return context.region_peaks(); });
      });
}

void bind_life(nb::class_<ContextObject>& type) {
  const auto close = [](const ContextObject& self) {
    self.run([](Context& context) { context.close(); });
  };
  type.def_static("create", &create, "config"_a.none(), "communicator"_a.none() = nb::none(),
                  nb::kw_only(), "backend"_a = "cpu", "device"_a = 0, "num_threads"_a = 0,
                  "Collective over the ranks of `communicator`; one rank without. `num_threads`: "
                  "worker threads of this rank on the CPU, 0 for its share of the cores.")
      .def("close", close, "Frees everything. Idempotent; not collective.")
      .def_prop_ro("is_closed",
                   [](const ContextObject& self) { return self.shared->context().is_closed(); })
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
      .def("__exit__", [close](const ContextObject& self, const nb::args&) { close(self); })
      .def(
          "check",
          [](const ContextObject& self) { self.run([](Context& context) { context.check(); }); },
          "Waits for the calls of this context and raises the first fault since the last check.");
}

}  // namespace

void bind_context(nb::module_& module) {
  bind_facts(module);
  nb::class_<ContextObject> type(module, "Context", nb::is_weak_referenceable(),
                                 "Owns the communication buffers, activation slots and scratch of "
                                 "one rank. Used by one thread at a time.");
  bind_life(type);
  bind_slots(type);
  refuse_copies(type,
                "it holds memory, threads and peers of one process; create another of its "
                "config");
  type.def_ro("config", &ContextObject::config)
      .def_prop_ro("memory_plan",
                   [](const ContextObject& self) { return self.shared->context().memory_plan(); })
      .def_prop_ro("rank", [](const ContextObject& self) { return self.shared->context().rank(); })
      .def_prop_ro("size", [](const ContextObject& self) { return self.shared->context().size(); })
      .def_prop_ro("first_expert",
                   [](const ContextObject& self) { return self.shared->context().first_expert(); })
      .def_prop_ro(
          "num_local_experts",
          [](const ContextObject& self) { return self.shared->context().num_local_experts(); })
      .def_prop_ro(
          "allocated_bytes",
          [](const ContextObject& self) { return self.shared->context().allocated_bytes(); })
      .def_prop_ro(
          "num_begun_calls",
          [](const ContextObject& self) { return self.shared->num_begun_calls(); },
          "Calls that reached the library on this rank, refused ones too.")
      .def("last_call", [](const ContextObject& self) {
        return self.run([](Context& context) { return context.last_call(); });
      });
}

}  // namespace distmoe::python
