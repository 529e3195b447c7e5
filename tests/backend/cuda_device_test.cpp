// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a machine without a GPU is told what it lacks, in words that say what to do.
#include "backend/cuda/device.hpp"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "backend/backend.hpp"

namespace distmoe::cuda {
namespace {

TEST(CudaDevice, AMachineWithoutADriverIsToldSo) {
  int version = -1;
  if (cudaDriverGetVersion(&version) != cudaSuccess || version != 0) {
    GTEST_SKIP() << "there is a driver";
  }
  EXPECT_EQ(why_unavailable(), "no NVIDIA driver is installed");
  EXPECT_EQ(device_count(), 0);
}

TEST(CudaDevice, EveryDeviceIsAskedBeforeCudaIsUnavailable) {
  if (device_count() == 0) GTEST_SKIP() << "there is no device: " << why_unavailable();
  bool has_usable = false;
  for (int device = 0; device < device_count(); ++device) {
    has_usable = has_usable || why_unusable(device).empty();
  }
  EXPECT_EQ(why_unavailable().empty(), has_usable);
}

}  // namespace
}  // namespace distmoe::cuda
