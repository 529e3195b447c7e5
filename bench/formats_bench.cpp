// SPDX-License-Identifier: Apache-2.0
//
// The block quantisers and decoders beside memcpy of as many bytes, on one thread: a matrix that no
// cache holds and one that the second cache does. Both take turns, so that other work on the
// machine meets both. docs/formats.md
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "bench/spread.hpp"
#include "formats/mxfp4.hpp"
#include "formats/mxfp8.hpp"
#include "formats/nvfp4.hpp"

namespace distmoe {
namespace {

constexpr std::int64_t kRounds = 15;
/// Small matrices are quantised several times between two looks at the clock.
constexpr double kMinBytesTimed = 32e6;

struct Shape {
  const char* name;
  std::int64_t rows;
  std::int64_t cols;
};
constexpr Shape kShapes[] = {{"memory", 8192, 4096}, {"second cache", 32, 4096}};

struct Case {
  const char* name;
  double read_bytes;
  double written_bytes;
  std::function<void()> run;
  std::function<void()> prepare = [] {};  ///< what `run` reads
};

/// Values and room for whatever a case writes.
struct Memory {
  explicit Memory(const Shape& shape)
      : rows(shape.rows),
        cols(shape.cols),
        values(static_cast<std::size_t>(rows * cols)),
        codes(values.size()),
        scales(values.size()),
        factors(static_cast<std::size_t>(rows)),
        decoded(values.size()),
        source(values.size() * 4, std::byte{1}),
        target(values.size() * 4) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (BF16& value : values) value = to_bf16(normal(random));
  }

  BF16Rows input() const { return {values.data(), rows, cols, cols}; }
  DecodedRows<BF16> output() { return {decoded.data(), rows, cols, cols}; }
  Mxfp8View mxfp8(std::int64_t scale_stride) {
    return {reinterpret_cast<E4M3*>(codes.data()), reinterpret_cast<E8M0*>(scales.data()), cols,
            scale_stride};
  }
  Mxfp4View mxfp4() {
    return {codes.data(), reinterpret_cast<E8M0*>(scales.data()), cols / 2, cols / 32};
  }
  Nvfp4View nvfp4() {
    return {codes.data(), reinterpret_cast<E4M3*>(scales.data()), cols / 2, cols / 16};
  }

  std::int64_t rows;
  std::int64_t cols;
  std::vector<BF16> values;
  std::vector<std::uint8_t> codes;
  std::vector<std::uint8_t> scales;
  std::vector<float> factors;
  std::vector<BF16> decoded;
  std::vector<std::byte> source;
  std::vector<std::byte> target;
};

std::vector<Case> cases_of(Memory& m) {
  const auto elements = static_cast<double>(m.rows * m.cols);
  const double scales32 = elements / 32;
  const double values = 2 * elements;
  const double fp8 = elements + scales32;
  const double fp4 = elements / 2;
  const std::int64_t blocks = m.cols / 32;
  const auto rows = [&m, blocks] { quantise_mxfp8_rows(m.input(), m.mxfp8(blocks)); };
  const auto columns = [&m] { quantise_mxfp8_columns(m.input(), m.mxfp8(m.cols)); };
  const auto tiles = [&m, blocks] { quantise_mxfp8_tiles(m.input(), m.mxfp8(blocks)); };
  const auto mxfp4 = [&m] { quantise_mxfp4(m.input(), m.mxfp4()); };
  const auto nvfp4_rows = [&m] { quantise_nvfp4_rows(m.input(), m.nvfp4(), m.factors.data()); };
  return {
      {"mxfp8 rows", values, fp8, rows},
      {"mxfp8 columns", values, fp8, columns},
      {"mxfp8 tiles", values, elements + scales32 / 32, tiles},
      {"mxfp4", values, fp4 + scales32, mxfp4},
      {"nvfp4 rows", values, fp4 + elements / 16, nvfp4_rows},
      {"nvfp4 expert", 2 * values, fp4 + elements / 16,
       [&m] { quantise_nvfp4_expert(m.input(), amax_of(m.input()), m.nvfp4()); }},
      {"decode mxfp8 rows", fp8, values,
       [&m, blocks] { decode_mxfp8(m.mxfp8(blocks), BlockShape::kRows, m.output()); }, rows},
      {"decode mxfp8 columns", fp8, values,
       [&m] { decode_mxfp8(m.mxfp8(m.cols), BlockShape::kColumns, m.output()); }, columns},
      {"decode mxfp8 tiles", elements + scales32 / 32, values,
       [&m, blocks] { decode_mxfp8(m.mxfp8(blocks), BlockShape::kTiles, m.output()); }, tiles},
      {"decode mxfp4", fp4 + scales32, values, [&m] { decode_mxfp4(m.mxfp4(), m.output()); },
       mxfp4},
      {"decode nvfp4", fp4 + elements / 16, values, [&m] { decode_nvfp4(m.nvfp4(), m.output()); },
       nvfp4_rows},
  };
}

/// CPU time of this thread, which leaves out waiting for a core that others use.
double thread_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

double seconds_of(const std::function<void()>& run, double bytes) {
  const auto repeats = static_cast<int>(1 + kMinBytesTimed / bytes);
  const double begin = thread_seconds();
  for (int i = 0; i < repeats; ++i) run();
  return (thread_seconds() - begin) / repeats;
}

void report(const Case& own, Memory& memory) {
  const double bytes = own.read_bytes + own.written_bytes;
  const auto copied = static_cast<std::size_t>(bytes / 2);
  const std::function<void()> copy = [&] {
    std::memcpy(memory.target.data(), memory.source.data(), copied);
    __asm__ volatile("" : : : "memory");  // each copy happens
  };
  std::vector<double> own_rates;
  std::vector<double> copy_rates;
  own.prepare();
  own.run();
  copy();
  for (std::int64_t round = 0; round < kRounds; ++round) {
    own_rates.push_back(bytes / seconds_of(own.run, bytes) / 1e9);
    copy_rates.push_back(bytes / seconds_of(copy, bytes) / 1e9);
  }
  const double rate = tools::spread_of(own_rates).median;
  const double copy_rate = tools::spread_of(copy_rates).median;
  std::printf("%-22s %8.1f %8.1f %8.2f\n", own.name, rate, copy_rate, rate / copy_rate);
}

}  // namespace
}  // namespace distmoe

int main() {
  for (const distmoe::Shape& shape : distmoe::kShapes) {
    std::printf("%s: BF16 [%lld, %lld], GB/s read and written, one thread\n", shape.name,
                static_cast<long long>(shape.rows), static_cast<long long>(shape.cols));
    std::printf("%-22s %8s %8s %8s\n", "", "own", "memcpy", "ratio");
    distmoe::Memory memory(shape);
    for (const distmoe::Case& own : distmoe::cases_of(memory)) distmoe::report(own, memory);
  }
  return 0;
}
