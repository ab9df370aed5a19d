#include <algorithm>
#include <cstdint>
#include <vector>

#include "check.hpp"
#include "permutation.hpp"

using Order = std::vector<std::int64_t>;

int main() {
  // Drawn by torch.randperm with torch.Generator().manual_seed(seed).
  CHECK((chronica::permutation(10, 0) == Order{4, 1, 7, 5, 3, 9, 0, 8, 6, 2}));
  CHECK((chronica::permutation(10, 7) == Order{5, 0, 3, 4, 1, 7, 9, 6, 8, 2}));
  CHECK((chronica::permutation(10, 4294967301) == Order{1, 4, 9, 6, 3, 5, 0, 2, 8, 7}));
  CHECK((chronica::permutation(10, static_cast<std::uint64_t>(-3)) == Order{1, 9, 7, 8, 5, 4, 3, 2, 6, 0}));
  CHECK((chronica::permutation(10, std::uint64_t{1} << 63U) == Order{4, 1, 7, 5, 3, 9, 0, 8, 6, 2}));
  CHECK((chronica::permutation(10, (std::uint64_t{1} << 63U) - 1) == Order{1, 4, 6, 2, 0, 5, 8, 7, 9, 3}));
  CHECK((chronica::permutation(5, 4294967301) == Order{1, 3, 0, 4, 2}));
  CHECK((chronica::permutation(8, static_cast<std::uint64_t>(-3)) == Order{3, 6, 7, 1, 2, 0, 5, 4}));
  CHECK(chronica::permutation(0, 1).empty());
  CHECK(chronica::permutation(1, 1) == Order{0});
  // Only the low 32 bits of a seed count.
  CHECK(chronica::permutation(100, 5) == chronica::permutation(100, (std::uint64_t{7} << 32U) + 5));

  Order order = chronica::permutation(10'000, 3);
  CHECK(!std::is_sorted(order.begin(), order.end()));
  std::sort(order.begin(), order.end());
  CHECK(order.front() == 0 && order.back() == 9'999);
  CHECK(std::adjacent_find(order.begin(), order.end()) == order.end());
  return failures;
}
