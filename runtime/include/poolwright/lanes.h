// Lets a kernels.cu compile as C++: every block and thread runs, one after the other.
//
// Included in front of the kernels by a generated host.cpp. `pw::each_lane` plays a launch.
#pragma once

#include <cstring>

#define PW_KERNEL [[maybe_unused]] static void
#define PW_PARAM const
#include "poolwright/prim.h"

#ifndef PW_EXPORT
#define PW_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace pw {

struct Lane {
  u32 index;
  u32 count;
  u32 block;
};
static thread_local Lane current_lane = {0, 1, 1};

PW_FN u32 lane() { return current_lane.index; }
PW_FN u32 lanes() { return current_lane.count; }

template <typename T> PW_FN T fetch(const char* at) {
  T v;
  memcpy(&v, at, sizeof(T));
  return v;
}
template <typename T> PW_FN void store(char* at, const T& v) { memcpy(at, &v, sizeof(T)); }

// Lanes run one after the other, and a block counts as one warp: it is done when its last lane is.
PW_FN void arrive(u32* done, u32 first, u32 steps) {
  if (done == nullptr || current_lane.index % current_lane.block != current_lane.block - 1) return;
  for (u32 n = 0; n < steps; ++n) done[first + n] += 1;
}

template <typename Body> static inline void each_lane(u32 grid, u32 block, Body body) {
  current_lane.count = grid * block;
  current_lane.block = block;
  for (current_lane.index = 0; current_lane.index < current_lane.count; ++current_lane.index) body();
  current_lane = {0, 1, 1};
}

}  // namespace pw
