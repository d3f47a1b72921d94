// Clocks for first_layer.py: what happens when, by the device's own time.

typedef unsigned int u32;
typedef unsigned long long u64;

static __device__ u64 now() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// Writes the time at which a stream comes to this point.
extern "C" __global__ void stamp(u64* out) {
  if (threadIdx.x == 0 && blockIdx.x == 0) *out = now();
}

// Writes when each of `count` arrivals from value `base` on is seen; gives up after `patience` nanoseconds.
extern "C" __global__ void watch(const u32* counter, u32 base, u32 count, u64* out, u64 patience) {
  if (threadIdx.x != 0 || blockIdx.x != 0) return;
  const u64 begin = now();
  for (u32 seen = 0; seen < count && now() - begin < patience;) {
    const u32 value = *(const volatile u32*)counter - base;
    if (value > count) continue;  // not yet in the round of this load
    const u64 t = now();
    for (; seen < value; ++seen) out[seen] = t;
  }
}

// Holds its stream until the counter has reached a value, and writes when.
extern "C" __global__ void spin(const u32* counter, u32 value, u64* out, u64 patience) {
  if (threadIdx.x != 0 || blockIdx.x != 0) return;
  const u64 begin = now();
  while ((*(const volatile u32*)counter - value & 0x80000000u) && now() - begin < patience) {
  }
  *out = now();
}
