// SPDX-License-Identifier: Apache-2.0
#include "core/current_error.hpp"

#include <new>

#include "core/check.hpp"

namespace distmoe {

Error current_error(std::string_view where) {
  try {
    throw;
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return {ErrorCode::kOutOfMemory, concat(where, ": the system gave no memory")};
  } catch (const std::exception& error) {
    return {ErrorCode::kInternal, concat(where, ": ", error.what())};
  } catch (...) {
    return {ErrorCode::kInternal, concat(where, ": an exception of an unknown type")};
  }
}

}  // namespace distmoe
