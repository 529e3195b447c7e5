// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the example prints what a plain loop in double precision computes from the same data.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int kRanks = 2, kTokens = 6, kTopK = 2, kLocalExperts = 2, kHidden = 64, kWidth = 32;
constexpr int kIds[kTokens][kTopK] = {{0, 1}, {2, 3}, {1, 2}, {3, 0}, {0, 2}, {1, -1}};
constexpr double kScores[kTokens][kTopK] = {{.9, .1}, {.8, .2}, {.7, .3},
                                            {.6, .4}, {.5, .5}, {1, 0}};

std::vector<double> random_values(int count, unsigned seed) {
  std::mt19937 generator(seed);
  std::vector<double> values;
  for (int i = 0; i < count; ++i) {
    const float number = static_cast<float>(generator() % 2048) / 2048.0F - 0.5F;
    values.push_back(std::bit_cast<float>(std::bit_cast<std::uint32_t>(number) & 0xFFFF0000U));
  }
  return values;
}

// Element 0 of Expert(x).
double first_output(int expert, const double* x) {
  const auto rank = static_cast<unsigned>(expert / kLocalExperts);
  const int local = expert % kLocalExperts;
  const auto w13 = random_values(kLocalExperts * 2 * kWidth * kHidden, 10 + rank);
  const auto w2 = random_values(kLocalExperts * kHidden * kWidth, 20 + rank);
  double sum = 0;
  for (int f = 0; f < kWidth; ++f) {
    double gate = 0, up = 0;
    for (int d = 0; d < kHidden; ++d) {
      gate += x[d] * w13[((local * 2 + 0) * kWidth + f) * kHidden + d];
      up += x[d] * w13[((local * 2 + 1) * kWidth + f) * kHidden + d];
    }
    sum += gate / (1 + std::exp(-gate)) * up * w2[local * kHidden * kWidth + f];
  }
  return sum;
}

std::string output_of(const char* command) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> pipe(popen(command, "r"), pclose);
  std::string text;
  char buffer[256];
  while (pipe && std::fgets(buffer, sizeof buffer, pipe.get()) != nullptr) text += buffer;
  return text;
}

TEST(RoutedExpertsExample, PrintsWhatAPlainLoopComputes) {
  const std::string text = output_of(DISTMOE_EXAMPLE);
  const char* rest = text.c_str();
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto x = random_values(kTokens * kHidden, static_cast<unsigned>(rank));
    for (int token = 0; token < kTokens; ++token) {
      double expected = 0;
      for (int k = 0; k < kTopK; ++k) {
        if (kIds[token][k] < 0) continue;
        expected += kScores[token][k] * first_output(kIds[token][k], &x[token * kHidden]);
      }
      int printed_rank = -1, printed_token = -1, consumed = 0;
      double printed = NAN;
      ASSERT_EQ(std::sscanf(rest, "rank %d token %d y[0] = %lf\n%n", &printed_rank, &printed_token,
                            &printed, &consumed),
                3)
          << text;
      rest += consumed;
      EXPECT_EQ(printed_rank, rank);
      EXPECT_EQ(printed_token, token);
      EXPECT_NEAR(printed, expected, 0.02) << "rank " << rank << " token " << token;
      EXPECT_GT(std::abs(expected), 1e-3) << "the data would not tell right from zero";
    }
  }
  EXPECT_STREQ(rest, "");
}

}  // namespace
