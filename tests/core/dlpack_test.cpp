// SPDX-License-Identifier: Apache-2.0
//
// Invariant: DLPack in and out keeps address, type, shape, strides and device; what distmoe cannot
// represent is refused by name, never reinterpreted.
#include "distmoe/dlpack.hpp"

#include <dlpack/dlpack.h>
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <memory>
#include <string>

#include "distmoe/error.hpp"

namespace distmoe {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

/// A producer's tensor over `data`; the arrays live as long as the object.
struct Producer {
  std::array<std::int64_t, 6> shape{2, 3, 4, 5, 6, 7};
  std::array<std::int64_t, 6> strides{};
  DLManagedTensor managed{};

  explicit Producer(void* data, DLDataType dtype = {kDLFloat, 32, 1}, int ndim = 2) {
    managed.dl_tensor = {data, {kDLCPU, 0}, ndim, dtype, shape.data(), nullptr, 0};
  }
  DLTensor& tensor() { return managed.dl_tensor; }
};

struct Deleter {
  void operator()(DLManagedTensor* tensor) const { tensor->deleter(tensor); }
};
using Exported = std::unique_ptr<DLManagedTensor, Deleter>;

void expect_error(Producer& producer, ErrorCode code, const std::string& part) {
  try {
    from_dlpack(producer.managed);
    ADD_FAILURE() << "no error; expected one with \"" << part << '"';
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(FromDlpack, MissingStridesMeanRowMajor) {
  std::array<float, 24> data{};
  Producer producer(data.data(), {kDLFloat, 32, 1}, 3);
  const TensorView view = from_dlpack(producer.managed);
  EXPECT_EQ(view.data, data.data());
  EXPECT_EQ(view.dtype, DType::kF32);
  EXPECT_EQ(view.shape, (std::array<std::int64_t, 4>{2, 3, 4, 0}));
  EXPECT_EQ(view.strides, (std::array<std::int64_t, 4>{12, 4, 1, 0}));
  EXPECT_TRUE(view.is_contiguous());
}

TEST(FromDlpack, GivenStridesAreKept) {
  std::array<float, 64> data{};
  Producer producer(data.data());
  producer.strides = {17, 2};
  producer.tensor().strides = producer.strides.data();
  const TensorView view = from_dlpack(producer.managed);
  EXPECT_EQ(view.strides, (std::array<std::int64_t, 4>{17, 2, 0, 0}));
  EXPECT_FALSE(view.is_contiguous());
}

TEST(FromDlpack, ByteOffsetMovesTheAddress) {
  std::array<std::uint16_t, 16> data{};
  Producer producer(data.data(), {kDLBfloat, 16, 1});
  producer.tensor().byte_offset = 6;
  EXPECT_EQ(from_dlpack(producer.managed).data, data.data() + 3);
}

// reports: A03: a tensor of 0 rows has a null pointer, and null plus an offset is not an address.
TEST(FromDlpack, EmptyTensorWithNullDataStaysNull) {
  Producer producer(nullptr);
  producer.shape[0] = 0;
  producer.tensor().byte_offset = 64;
  const TensorView view = from_dlpack(producer.managed);
  EXPECT_EQ(view.data, nullptr);
  EXPECT_TRUE(view.is_given());
  EXPECT_EQ(view.num_elements(), 0);
}

TEST(FromDlpack, PinnedHostMemoryCountsAsCpuAndManagedMemoryAsCuda) {
  Producer producer(nullptr);
  producer.tensor().device = {kDLCUDAHost, 3};
  EXPECT_EQ(from_dlpack(producer.managed).device, (Device{DeviceType::kCpu, 0}));
  producer.tensor().device = {kDLCUDA, 3};
  EXPECT_EQ(from_dlpack(producer.managed).device, (Device{DeviceType::kCuda, 3}));
  producer.tensor().device = {kDLCUDAManaged, 1};
  EXPECT_EQ(from_dlpack(producer.managed).device, (Device{DeviceType::kCuda, 1}));
}

TEST(FromDlpack, OtherDevicesAreUnsupportedByNumber) {
  Producer producer(nullptr);
  producer.tensor().device = {kDLVulkan, 0};
  expect_error(producer, ErrorCode::kUnsupported, "device type 7");
}

TEST(FromDlpack, VectorLanesAreUnsupported) {
  Producer producer(nullptr, {kDLFloat, 32, 4});
  expect_error(producer, ErrorCode::kUnsupported, "4 lanes");
}

TEST(FromDlpack, TypesWithoutADTypeAreUnsupportedByName) {
  Producer complex_type(nullptr, {kDLComplex, 64, 1});
  expect_error(complex_type, ErrorCode::kUnsupported, "elements of complex64");
  Producer four_bits(nullptr, {kDLInt, 4, 1});
  expect_error(four_bits, ErrorCode::kUnsupported, "elements of int4");
  Producer opaque(nullptr, {kDLOpaqueHandle, 64, 1});
  expect_error(opaque, ErrorCode::kUnsupported, "elements of opaque64");
  Producer eight_bits(nullptr, {10, 8, 1});
  expect_error(eight_bits, ErrorCode::kUnsupported, "elements of float8_e4m3fn");
  Producer unknown(nullptr, {200, 8, 1});
  expect_error(unknown, ErrorCode::kUnsupported, "elements of DLPack's type 200 of 8 bits");
}

TEST(FromDlpack, ScalarsAndMoreThanFourDimensionsAreRefused) {
  Producer scalar(nullptr, {kDLFloat, 32, 1}, 0);
  expect_error(scalar, ErrorCode::kInvalidArgument, "0 dimensions");
  Producer five(nullptr, {kDLFloat, 32, 1}, 5);
  expect_error(five, ErrorCode::kInvalidArgument, "5 dimensions");
}

TEST(FromDlpack, NegativeExtentsAndSizesBeyond64BitsAreRefused) {
  Producer negative(nullptr);
  negative.shape[1] = -3;
  expect_error(negative, ErrorCode::kInvalidArgument, "extent -3 in dimension 1");
  Producer huge(nullptr);
  huge.shape = {kMax / 2, 3};
  expect_error(huge, ErrorCode::kInvalidArgument, "64 bits");
  Producer huge_in_bytes(nullptr, {kDLFloat, 64, 1});
  huge_in_bytes.shape = {kMax / 4, 1};
  expect_error(huge_in_bytes, ErrorCode::kInvalidArgument, "64 bits");
}

TEST(RoundTrip, EveryTypeThatDlpackKnowsComesBackAsItself) {
  for (const DType dtype :
       {DType::kBF16, DType::kF16, DType::kF32, DType::kF64, DType::kI16, DType::kI32, DType::kI64,
        DType::kU8, DType::kU16, DType::kU32, DType::kU64, DType::kBool}) {
    const Exported exported(to_dlpack(TensorView(nullptr, dtype, {3, 5})));
    EXPECT_EQ(from_dlpack(*exported).dtype, dtype) << to_string(dtype);
    EXPECT_EQ(exported->dl_tensor.dtype.bits, 8 * size_of(dtype)) << to_string(dtype);
  }
}

TEST(RoundTrip, EightBitFloatsTravelAsBytes) {
  for (const DType dtype : {DType::kF8E4M3, DType::kF8E5M2, DType::kF8E8M0}) {
    const Exported exported(to_dlpack(TensorView(nullptr, dtype, {3, 5})));
    EXPECT_EQ(from_dlpack(*exported).dtype, DType::kU8) << to_string(dtype);
  }
}

TEST(RoundTrip, AddressShapeStridesAndDeviceComeBack) {
  std::array<std::uint16_t, 64> data{};
  TensorView view = TensorView::strided(data.data() + 1, DType::kBF16, {2, 3, 4, 2}, {31, 9, 2, 1});
  view.device = {DeviceType::kCuda, 1};
  const Exported exported(to_dlpack(view));
  const TensorView back = from_dlpack(*exported);
  EXPECT_EQ(back.data, view.data);
  EXPECT_EQ(back.rank, 4);
  EXPECT_EQ(back.shape, view.shape);
  EXPECT_EQ(back.strides, view.strides);
  EXPECT_EQ(back.device, view.device);
}

TEST(ToDlpack, HeaderOutlivesTheViewAndTheDeleterLeavesTheMemoryAlone) {
  std::array<float, 6> data{1, 2, 3, 4, 5, 6};
  Exported exported;
  {
    const TensorView view(data.data(), DType::kF32, {2, 3});
    exported.reset(to_dlpack(view));
  }
  EXPECT_EQ(exported->dl_tensor.shape[1], 3);
  EXPECT_EQ(exported->dl_tensor.strides[0], 3);
  EXPECT_EQ(exported->dl_tensor.byte_offset, 0U);
  exported.reset();
  EXPECT_EQ(data[5], 6);
}

}  // namespace
}  // namespace distmoe
