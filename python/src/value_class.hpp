// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "config_argument.hpp"

namespace distmoe::python {

/// A Python class of plain data: its fields are read by their names, and compare, print, copy and
/// pickle it. The casters of the fields' types must be included.
template <typename Value>
class ValueClass {
 public:
  ValueClass(nanobind::module_& module, const char* name, const char* doc)
      : class_(module, name, doc), fields_(std::make_shared<Fields>()) {
    class_
        .def("__getstate__", [fields = fields_](const Value& self) { return state(*fields, self); })
        .def("__setstate__",
             [fields = fields_](Value& self, const nanobind::dict& given) {
               auto* value = new (&self) Value();
               for (const Field& field : *fields) field.set(*value, given[field.name]);
             })
        .def(
            "__eq__",
            [fields = fields_](const Value& self, const Value& other) {
              return state(*fields, self).equal(state(*fields, other));
            },
            nanobind::is_operator())
        .def("__repr__", [fields = fields_, name](const Value& self) {
          std::string text = concat(name, "(");
          for (const Field& field : *fields) {
            const nanobind::object value = field.get(self);
            if (text.back() != '(') text += ", ";
            text += concat(field.name, "=", nanobind::repr(value).c_str());
          }
          return text + ")";
        });
    class_.attr("__hash__") = nanobind::none();
  }

  template <typename Member>
  ValueClass& field(const char* name, Member Value::*member, const char* doc = "") {
    class_.def_ro(name, member, doc);
    fields_->push_back({name, [member](const Value& self) { return nanobind::cast(self.*member); },
                        [member](Value& self, nanobind::handle given) {
                          self.*member = nanobind::cast<Member>(given);
                        }});
    return *this;
  }

  /// A field whose type is not Python's: as `get(value)` makes it, and `set(value, made)` reads it.
  template <typename Get, typename Set>
  ValueClass& field(const char* name, const Get& get, const Set& set, const char* doc = "") {
    class_.def_prop_ro(name, get, doc);
    using Made = decltype(get(std::declval<const Value&>()));
    fields_->push_back(
        {name, [get](const Value& self) { return nanobind::cast(get(self)); },
         [set](Value& self, nanobind::handle given) { set(self, nanobind::cast<Made>(given)); }});
    return *this;
  }

  /// For what is no field.
  nanobind::class_<Value>& type() { return class_; }

 private:
  struct Field {
    const char* name;
    std::function<nanobind::object(const Value&)> get;
    std::function<void(Value&, nanobind::handle)> set;
  };
  using Fields = std::vector<Field>;

  static nanobind::dict state(const Fields& fields, const Value& self) {
    nanobind::dict values;
    for (const Field& field : fields) values[field.name] = field.get(self);
    return values;
  }

  nanobind::class_<Value> class_;
  std::shared_ptr<Fields> fields_;
};

}  // namespace distmoe::python
