#pragma once

#include <cstdio>

/// Whether a check has failed; what main returns.
inline int failures = 0;

/// Print a condition that does not hold and go on, so that one run shows all of them.
#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      failures = 1;                                                                \
    }                                                                              \
  } while (false)
