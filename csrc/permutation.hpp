#pragma once

#include <cstdint>
#include <vector>

namespace chronica {

/// The permutation of 0 … n − 1 that `torch.randperm` draws on the CPU from a generator seeded with `seed`.
///
/// Mersenne Twister and a Fisher-Yates shuffle from the front (ATen/native/TensorFactories.cpp, `randperm_cpu`), so
/// that plans need no torch and yet hold the samples of torch's `DistributedSampler`.
std::vector<std::int64_t> permutation(std::int64_t n, std::uint64_t seed);

}  // namespace chronica
