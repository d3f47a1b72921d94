// Primitives of generated code: integers, vectors, id lists, progress counters.
//
// They know no pool, page, layer or component. The same text compiles as CUDA (NVRTC or nvcc) and, with
// lanes.h in front of it, as C++ that runs every block and thread on the CPU.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define PW_FN __device__ __forceinline__
#define PW_BODY __device__ __noinline__
#define PW_KERNEL extern "C" __global__ void __launch_bounds__(512)
#define PW_PARAM const __grid_constant__
#define PW_UNROLL _Pragma("unroll")
#else
#define PW_FN inline
#define PW_BODY __attribute__((noinline)) inline
#define PW_UNROLL
#endif

// Largest power of two that divides every tensor address and every stride read at bind.
#ifndef PW_ALIGN
#define PW_ALIGN 16
#endif

// A named number of a namespace. As a constant CUDA would keep it as a variable of every module, used or not, and the
// driver takes 5 us to load one: hundreds of them would be most of what loading a pool's kernels takes.
#if defined(PW_CONSTANT)  // as a benchmark has it
#elif defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define PW_CONSTANT(type, name, value) enum : type { name = value }
#else
#define PW_CONSTANT(type, name, value) [[maybe_unused]] constexpr type name = value
#endif

namespace pw {

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define PW_CONSTEXPR __device__ __host__ constexpr
#else
#define PW_CONSTEXPR constexpr
#endif

// Rounds towards minus infinity, as the expressions of a spec do.
PW_CONSTEXPR i64 floor_div(i64 a, i64 b) { return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0); }
PW_CONSTEXPR i64 floor_mod(i64 a, i64 b) { return a - floor_div(a, b) * b; }
PW_CONSTEXPR i64 ceil_div(i64 a, i64 b) { return -floor_div(-a, b); }
PW_CONSTEXPR i64 align_up(i64 a, i64 b) { return ceil_div(a, b) * b; }
PW_CONSTEXPR i64 least(i64 a, i64 b) { return a < b ? a : b; }
PW_CONSTEXPR i64 most(i64 a, i64 b) { return a > b ? a : b; }
PW_CONSTEXPR i64 gcd(i64 a, i64 b) { return b == 0 ? (a < 0 ? -a : a) : gcd(b, a % b); }

// A divisor that is never zero: an extent of zero leaves no work, its quotient is never used.
PW_CONSTEXPR u32 divisor(i64 extent) { return extent > 0 ? u32(extent) : 1u; }

// Widest vector (16, 8, 4, 2, 1 bytes) that divides `grain` and the alignment of the addresses.
PW_CONSTEXPR i64 vector_width(i64 grain) { return gcd(16, gcd(grain, i64(PW_ALIGN))); }

template <i64 bytes> struct vector_of;
template <> struct vector_of<1> { typedef u8 type; };
template <> struct vector_of<2> { typedef u16 type; };
template <> struct vector_of<4> { typedef u32 type; };
template <> struct vector_of<8> { typedef u64 type; };
struct alignas(16) u128 { u32 x, y, z, w; };
template <> struct vector_of<16> { typedef u128 type; };
template <i64 bytes> using Vector = typename vector_of<bytes>::type;

// Loads a thread has in flight before it stores: a read over the link takes about a microsecond.
// Where layers are counted it has fewer and there are more blocks: none is far behind when a layer ends.
#ifdef PW_IN_FLIGHT
PW_CONSTANT(u32, in_flight, PW_IN_FLIGHT);
PW_CONSTANT(u32, in_flight_by_layer, PW_IN_FLIGHT);
#else
PW_CONSTANT(u32, in_flight, 8);
PW_CONSTANT(u32, in_flight_by_layer, 4);
#endif

// One run that is contiguous on both sides.
struct Run {
  char* device;
  char* host;
};

struct WriteBack {
  static PW_FN const char* from(const Run& run) { return run.device; }
  static PW_FN char* to(const Run& run) { return run.host; }
};
struct Load {
  static PW_FN const char* from(const Run& run) { return run.host; }
  static PW_FN char* to(const Run& run) { return run.device; }
};

// The lane that follows a loop over `total` vectors: lanes that had one less than others come first. Otherwise the
// same warps would be behind in every step. Whole warps move on, so that each reads neighbouring vectors.
PW_FN u32 next(u32 lane, u32 lanes, u32 total) {
  const u32 before = total % lanes / 32 * 32;
  return lane >= before ? lane - before : lane + lanes - before;
}

PW_FN u32 fewer(u32 a, u32 b) { return a < b ? a : b; }

// An id that stands for nothing: checks on the device put it where they found a wrong one.
PW_CONSTANT(u32, skipped, 0xffffffffu);

// A number that nobody writes meanwhile: it may be read ahead of what stands before it.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
PW_FN u32 number(const u32* at) { return __ldg(at); }
#else
PW_FN u32 number(const u32* at) { return *at; }
#endif

// Page ids of one launch, in pairs.
struct PageIds {
  const u32* host_ids;
  const u32* device_ids;
  PW_FN u32 host(u32 n) const { return host_ids[n]; }
  PW_FN u32 device(u32 n) const { return device_ids[n]; }
};

// Token ids of one launch: pairs, or (`in_place`) host pages and device ids where the caller has them. Read without
// branches: they stand in every copy of an unrolled loop, and compiling took half as long again with them.
struct TokenIds {
  const u32* host_ids;
  u64 device_ids;  // address of the first; of 64-bit ids the lower halves, which come first in memory, are read
  i64 step;        // bytes from one device id to the next
  bool in_place;
  PW_FN u32 host(u32 n, u32 page_size) const {
    const u32 id = number(host_ids + (in_place ? n / page_size : n));
    return in_place ? id * page_size + n % page_size : id;
  }
  PW_FN u32 device(u32 n) const { return number((const u32*)(device_ids + u64(i64(n) * step))); }
};

// Few page ids travel in the parameters of a launch: host ids of a pool, then its device ids.
struct Few {
  u32 at[256];
};

// What some steps of a load in layer order say of one layer list: the position of each, or `skipped`.
struct Column {
  const u32* at;
  u32 stride;  // numbers from one step to the next
  u32 count;
  PW_FN u32 number(u32 step) const { return pw::number(at + step * stride); }
  PW_FN bool any() const {
    for (u32 step = 0; step < count; ++step) {
      if (number(step) != skipped) return true;
    }
    return false;
  }
};

// One run of a load in layer order: of which id, in which step, and which of that id's runs.
struct Turn {
  u32 id;
  u32 step;
  u32 run;
};

// Run `at` of all, as steps lie on the host: `inner` runs of a step, the same runs of the next steps, then the next
// of the id's `runs`. So neighbouring steps of one host page are read together.
PW_FN Turn turn(u32 at, u32 inner, u32 runs, u32 steps) {
  const u32 part = at / inner, place = part / steps;
  const u32 parts = runs / inner > 0 ? runs / inner : 1;
  return {place / parts, part % steps, place % parts * inner + at % inner};
}

// Steps of a load in layer order that are moved together.
struct Steps {
  const u32* at;
  u32 columns;
  u32 count;
  PW_FN Column column(u32 n) const { return {at + n, columns, count}; }
};

// Ids of one pool in a launch, as they stand in the parameters.
struct Ids {
  u32 count;     // 0: the pool has nothing in this launch
  u32 few;       // 1 + where its ids start in `Few`; 0: they lie in device memory
  u32 by_token;  // 1: token ids, 0: page ids
  u32 wide;      // 1: `memory` holds 64-bit ids, 0: 32-bit
  const u32* host_ids;
  const u32* device_ids;
  u64 memory;
  i64 step;
  const u32* steps;  // a load in layer order: the numbers of each step
  PW_FN PageIds pages(const Few& list) const {
    return few ? PageIds{list.at + few - 1, list.at + few - 1 + count} : PageIds{host_ids, device_ids};
  }
  PW_FN TokenIds tokens() const {
    if (!memory) return {host_ids, u64(device_ids), 4, false};
    return {host_ids, memory, step * (wide ? 8 : 4), true};
  }
  PW_FN Steps window(u32 first, u32 columns, u32 count) const { return {steps + first * columns, columns, count}; }
};

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

PW_FN u32 lane() { return blockIdx.x * blockDim.x + threadIdx.x; }
PW_FN u32 lanes() { return gridDim.x * blockDim.x; }

// Bytes pass once: they must not push other data out of the L1 cache.
template <typename T> PW_FN T fetch(const char* at) { return __ldcs((const T*)at); }
template <> PW_FN u128 fetch<u128>(const char* at) {
  u128 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}
template <typename T> PW_FN void store(char* at, const T& v) { __stcs((T*)at, v); }
template <> PW_FN void store<u128>(char* at, const u128& v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Counts this warp as done with `steps` steps from `first` on; whoever waits for all warps sees all their stores.
// Warps do not wait for each other: while one is behind, the others keep the link busy.
PW_FN void arrive(u32* done, u32 first, u32 steps) {
  if (done == nullptr) return;
  __syncwarp();  // the fence of each lane covers what the others have stored
  __threadfence();
  for (u32 n = threadIdx.x % warpSize; n < steps; n += warpSize) atomicAdd(done + first + n, 1u);
}

#endif

}  // namespace pw

typedef pw::Run Run;
