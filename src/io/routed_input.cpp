// SPDX-License-Identifier: Apache-2.0
#include "io/routed_input.hpp"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <string>
#include <string_view>

#include "core/check.hpp"
#include "core/current_error.hpp"
#include "io/quote.hpp"

namespace distmoe {
namespace {

/// Finds one layer's tensors in a file and checks that they are two-dimensional and of a legal
/// type.
class InputReader {
 public:
  InputReader(const SafetensorsFile& file, std::int64_t layer) : file_(file) {
    const std::string prefix = concat("layer", layer, '.');
    const bool has_layer = std::ranges::any_of(file.tensors(), [&](const StoredTensor& tensor) {
      return tensor.name.starts_with(prefix);
    });
    if (has_layer) prefix_ = prefix;
    alternatives_ = has_layer ? "" : concat(" (nor one of '", prefix, "*')");
  }

  /// Null where the file has none.
  const StoredTensor* find(std::string_view name, std::initializer_list<DType> dtypes,
                           const char* legal) const {
    const StoredTensor* tensor = file_.find(prefix_ + std::string(name));
    if (tensor == nullptr) return nullptr;
    const bool has_type =
        tensor->dtype && std::find(dtypes.begin(), dtypes.end(), *tensor->dtype) != dtypes.end();
    DISTMOE_CHECK(has_type && tensor->shape.size() == 2, kInvalidArgument, "tensor ",
                  quote(tensor->name), " in ", file_.path().string(), " is ", tensor->describe(),
                  "; legal is ", legal);
    return tensor;
  }

  const StoredTensor& get(std::string_view name, std::initializer_list<DType> dtypes,
                          const char* legal) const {
    const StoredTensor* tensor = find(name, dtypes, legal);
    DISTMOE_CHECK(tensor != nullptr, kInvalidArgument, file_.path().string(), " has no tensor '",
                  prefix_, name, "'", alternatives_, ", which must be ", legal);
    return *tensor;
  }

  void check_shape(const StoredTensor& tensor, const StoredTensor& other, std::size_t dim) const {
    DISTMOE_CHECK(tensor.shape[dim] == other.shape[dim], kInvalidArgument, "tensor ",
                  quote(tensor.name), " in ", file_.path().string(), " is ", tensor.describe(),
                  ", but ", quote(other.name), " is ", other.describe(), ": extent ", dim,
                  " must be equal");
  }

 private:
  const SafetensorsFile& file_;
  std::string prefix_;
  std::string alternatives_;
};

/// A view of the file's bytes or, where they are not aligned to an element, of a copy in `copies`.
TensorView view_of(const StoredTensor& tensor, std::vector<TensorStorage>& copies) {
  const void* data = tensor.data.data();
  const std::size_t width = size_of(tensor.known_dtype());
  if (reinterpret_cast<std::uintptr_t>(data) % width != 0 && !tensor.data.empty()) {
    TensorStorage& storage = copies.emplace_back(tensor.data.size(), tensor.name);
    std::memcpy(storage.data(), data, tensor.data.size());
    data = storage.data();
  }
  return TensorView(data, tensor.known_dtype(), {tensor.shape[0], tensor.shape[1]});
}

}  // namespace

RoutedInputFile RoutedInputFile::open(const std::filesystem::path& path, std::int64_t layer) {
  return only_errors("opening an input", [&] {
    RoutedInputFile result(SafetensorsFile::open(path));
    const InputReader reader(result.file_, layer);
    const StoredTensor& x = reader.get("x", {DType::kBF16}, "BF16 [T, D]");
    const StoredTensor& ids =
        reader.get("topk_ids", {DType::kI32, DType::kI64}, "I32 or I64 [T, K]");
    const StoredTensor& scores =
        reader.get("topk_scores", {DType::kF32, DType::kBF16}, "F32 or BF16 [T, K]");
    const StoredTensor* y_ref = reader.find("y_ref", {DType::kF32}, "F32 [T, D]");
    const StoredTensor* dy = reader.find("dy", {DType::kBF16}, "BF16 [T, D]");
    reader.check_shape(ids, x, 0);
    reader.check_shape(scores, x, 0);
    reader.check_shape(scores, ids, 1);
    for (const StoredTensor* rows : {y_ref, dy}) {
      if (rows == nullptr) continue;
      reader.check_shape(*rows, x, 0);
      reader.check_shape(*rows, x, 1);
    }
    result.input_.x_TD = view_of(x, result.realigned_);
    result.input_.topk_ids_TK = view_of(ids, result.realigned_);
    result.input_.topk_scores_TK = view_of(scores, result.realigned_);
    if (y_ref != nullptr) result.y_ref_ = view_of(*y_ref, result.realigned_);
    if (dy != nullptr) result.dy_ = view_of(*dy, result.realigned_);
    return result;
  });
}

}  // namespace distmoe
