// SPDX-License-Identifier: Apache-2.0
//
// Communicators: those of the library, and those that Python implements.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <nanobind/trampoline.h>

#include <optional>
#include <string>

#include "bindings.hpp"
#include "config_argument.hpp"
#include "distmoe/communicator.hpp"
#include "value_class.hpp"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace distmoe::python {
namespace {

double seconds_of(Communicator::Timeout timeout) {
  return static_cast<double>(timeout.count()) / 1000.0;
}

/// Views of a call's buffers, which are gone when the call is over.
class LentViews {
 public:
  explicit LentViews(std::span<const std::span<const std::byte>> buffers) {
    for (const auto& buffer : buffers) {
      append(const_cast<std::byte*>(buffer.data()), buffer.size(), PyBUF_READ);
    }
  }
  explicit LentViews(std::span<const std::span<std::byte>> buffers) {
    for (const auto& buffer : buffers) append(buffer.data(), buffer.size(), PyBUF_WRITE);
  }
  LentViews(const LentViews&) = delete;
  LentViews& operator=(const LentViews&) = delete;
  ~LentViews() {
    for (const nb::handle view : list_) {
      const nb::object released = nb::steal(PyObject_CallMethod(view.ptr(), "release", nullptr));
      // What Python code still looks at cannot be taken away from it.
      if (!released.is_valid()) PyErr_Clear();
    }
  }

  const nb::list& list() const { return list_; }

 private:
  void append(std::byte* data, std::size_t bytes, int access) {
    static char nothing = 0;
    char* start = bytes == 0 ? &nothing : reinterpret_cast<char*>(data);
    const nb::object view =
        nb::steal(PyMemoryView_FromMemory(start, static_cast<Py_ssize_t>(bytes), access));
    if (!view.is_valid()) throw nb::python_error();
    list_.append(view);
  }

  nb::list list_;
};

/// A communicator that is a Python class. What cannot throw in C++ is asked of it once, before it
/// is used: see prepare().
class PythonCommunicator : public Communicator {
 public:
  NB_TRAMPOLINE(Communicator);

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  std::string_view name() const noexcept override { return name_; }

  void alltoallv(std::span<const std::span<const std::byte>> send,
                 std::span<const std::span<std::byte>> recv, Timeout timeout) override {
    call_python("alltoallv", [&] {
      const LentViews sent(send), received(recv);
      self().attr("alltoallv")(sent.list(), received.list(), seconds_of(timeout));
    });
  }

  void barrier(Timeout timeout) override {
    call_python("barrier", [&] { self().attr("barrier")(seconds_of(timeout)); });
  }

  void abort(std::string_view reason) noexcept override {
    try {
      call_python("abort", [&] { self().attr("abort")(std::string(reason)); });
      // NOLINTNEXTLINE(bugprone-empty-catch)
    } catch (const Error&) {  // the contract of abort(): there is nobody to tell
    }
  }

  void prepare() {
    for (const char* method : {"rank", "size", "name", "alltoallv", "barrier", "abort"}) {
      if (is_implemented(method)) continue;
      throw_type_error(concat(class_name(), " has no ", method,
                              "(); a Communicator implements rank, size, name, alltoallv, barrier "
                              "and abort"));
    }
    ask("rank", rank_, "an integer");
    ask("size", size_, "an integer");
    ask("name", name_, "a string");
  }

 private:
  nb::handle self() const { return nb_trampoline.base(); }
  std::string class_name() const { return nb::type_name(self().type()).c_str(); }

  /// The methods of the base class answer what prepare() was told.
  bool is_implemented(const char* method) const {
    const nb::object own = nb::getattr(self().type(), method, nb::none());
    return nb::cast<nb::dict>(self().attr("__dict__")).contains(method) ||
           !own.is(nb::getattr(nb::type<Communicator>(), method, nb::none()));
  }

  template <typename Answer>
  void ask(const char* method, Answer& answer, const char* legal) const {
    const nb::object given = self().attr(method)();
    if (nb::try_cast(given, answer)) return;
    throw_type_error(concat(method, "() of ", class_name(), " is ", nb::repr(given).c_str(),
                            "; it must be ", legal));
  }

  int rank_ = 0;
  int size_ = 1;
  std::string name_;
};

void bind_factories(nb::module_& module) {
  module.def("make_thread_group", &make_thread_group, "size"_a,
             "The communicators of a group whose ranks are threads of this process.");
  module.def(
      "run_thread_group",
      [](int size, const nb::callable& body) {
        const nb::gil_scoped_release release;
        run_thread_group(size, [&](const std::shared_ptr<Communicator>& communicator) {
          call_python("the body of a rank", [&] { body(communicator); });
        });
      },
      "size"_a, "body"_a, "Runs `body(communicator)` on `size` threads, one a rank.");
  module.def("make_mpi_communicator", &make_mpi_communicator,
             nb::call_guard<nb::gil_scoped_release>(), "The ranks of MPI_COMM_WORLD.");
  ValueClass<TcpGroup> tcp_group(module, "TcpGroup", "Where the ranks of a TCP group meet.");
  tcp_group.field("rank", &TcpGroup::rank)
      .field("size", &TcpGroup::size)
      .field("host", &TcpGroup::host)
      .field("port", &TcpGroup::port)
      .field("job", &TcpGroup::job)
      .type()
      .def(
          "__init__",
          [](TcpGroup* self, int rank, int size, std::string host, int port, std::string job) {
            new (self) TcpGroup{rank, size, std::move(host), port, std::move(job)};
          },
          "rank"_a, "size"_a, "host"_a, "port"_a, "job"_a = "");
  module.def("torchrun_group", &torchrun_group,
             "The group of a process that torchrun started, from its environment.");
  module.def(
      "make_tcp_communicator",
      [](const TcpGroup& group, double timeout) {
        const auto limit = milliseconds_of("timeout", timeout);
        const nb::gil_scoped_release release;
        return make_tcp_communicator(group, limit);
      },
      "group"_a, "timeout"_a = 600.0);
  module.def(
      "make_nccl_communicator",
      [](nb::handle given, int device, double timeout) {
        const auto limit = milliseconds_of("timeout", timeout);
        std::shared_ptr<Communicator> host = communicator_of("host", given);
        const nb::gil_scoped_release release;
        return make_nccl_communicator(std::move(host), device, limit);
      },
      "host"_a, "device"_a, "timeout"_a = 600.0,
      "Adds symmetric memory of GPUs to `host`, which carries all calls.");
}

}  // namespace

void bind_communicator(nb::module_& module) {
  nb::class_<Communicator, PythonCommunicator>(
      module, "Communicator", nb::is_weak_referenceable(),
      "The ranks of an expert-parallel group. Derive from it to run over a transport of your own: "
      "implement rank(), size(), name(), alltoallv(send, recv, timeout), barrier(timeout) and "
      "abort(reason). alltoallv gets two lists of memoryviews, one a rank, which are valid during "
      "the call; timeouts are seconds. rank, size and name are asked once.")
      .def(nb::init<>())
      .def("rank", &Communicator::rank)
      .def("size", &Communicator::size)
      .def("name", [](const Communicator& self) { return std::string(self.name()); })
      .def(
          "barrier",
          [](Communicator& self, double timeout) {
            const auto limit = milliseconds_of("timeout", timeout);
            const nb::gil_scoped_release release;
            self.barrier(limit);
          },
          "timeout"_a)
      .def(
          "abort",
          [](Communicator& self, const std::string& reason) {
            const nb::gil_scoped_release release;
            self.abort(reason);
          },
          "reason"_a);
  bind_factories(module);
}

std::shared_ptr<Communicator> communicator_of(const char* name, nb::handle given) {
  if (given.is_none()) return nullptr;
  const std::string class_name = nb::type_name(given.type()).c_str();
  if (!nb::isinstance<Communicator>(given)) {
    throw_type_error(
        concat(name, " is ", class_name, "; it must be a distmoe.Communicator or None"));
  }
  if (!nb::inst_ready(given)) {
    throw_type_error(
        concat(name, " is ", class_name, ", whose __init__ must call super().__init__()"));
  }
  auto communicator = nb::cast<std::shared_ptr<Communicator>>(given);
  if (auto* python = dynamic_cast<PythonCommunicator*>(communicator.get())) python->prepare();
  return communicator;
}

}  // namespace distmoe::python
