// Copies of the CPU twin: many runs of equal length, placed anywhere, spread over threads.
//
// A caller numbers its runs and says where each lies; no pool, page, layer or component is known here.
// Bytes only: no alignment is asked of either side, and runs must not overlap.
#pragma once

#include <cstdint>
#include <cstring>
#include <pthread.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "poolwright/prim.h"

namespace pw {

constexpr u64 line_bytes = 64;           // of a cache line
constexpr u64 ahead_bytes = 2048;        // how far ahead reads are asked for; 1 to 4 KiB measure alike
constexpr u64 piece_bytes = 256 << 10;   // longer runs are cut, so that a few of them occupy all threads
constexpr u64 thread_bytes = 512 << 10;  // less than this is copied sooner than a thread starts
constexpr u32 max_threads = 256;

// From this total on, stores that bypass the cache win: the destination would not stay in it anyway.
constexpr u64 streaming_bytes = 8 << 20;

struct Copy {
  char* to;
  const char* from;
};

inline void prefetch(const char* from) {
#if defined(__GNUC__)
  __builtin_prefetch(from);
#endif
}

// Makes streaming stores of this thread visible before anything it stores later.
inline void copy_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Copies one cache line to a line-aligned address without reading the old line.
inline void stream_line(char* to, const char* from) {
#if defined(__SSE2__)
  const __m128i* source = reinterpret_cast<const __m128i*>(from);
  __m128i* target = reinterpret_cast<__m128i*>(to);
  const __m128i a = _mm_loadu_si128(source);
  const __m128i b = _mm_loadu_si128(source + 1);
  const __m128i c = _mm_loadu_si128(source + 2);
  const __m128i d = _mm_loadu_si128(source + 3);
  _mm_stream_si128(target, a);
  _mm_stream_si128(target + 1, b);
  _mm_stream_si128(target + 2, c);
  _mm_stream_si128(target + 3, d);
#else
  std::memcpy(to, from, line_bytes);
#endif
}

// Copies a run by streaming whole lines, and asks for `bytes` bytes from `next` on the way: one line for
// each line copied, since a burst of prefetches would wait for the same fill buffers as the stores.
inline void stream_run(char* to, const char* from, u64 bytes, const char* next) {
  u64 head = (line_bytes - (reinterpret_cast<std::uintptr_t>(to) & (line_bytes - 1))) & (line_bytes - 1);
  if (head > bytes) head = bytes;
  if (head != 0) {
    prefetch(next);
    std::memcpy(to, from, head);
  }
  u64 at = head;
  for (; at + line_bytes <= bytes; at += line_bytes) {
    prefetch(next + at);
    stream_line(to + at, from + at);
  }
  if (at < bytes) {
    prefetch(next + at);
    std::memcpy(to + at, from + at, bytes - at);
  }
}

// The same for a run of more than `ahead_bytes`: asks for its own bytes, then for those of the next run.
inline void stream_long_run(char* to, const char* from, u64 bytes, const char* next) {
  const u64 body = bytes - ahead_bytes;
  stream_run(to, from, body, from + ahead_bytes);
  stream_run(to + body, from + body, ahead_bytes, next);
}

// Copies one run. With `streaming` the caller owes a `copy_fence` before others may read it.
inline void copy_run(char* to, const char* from, u64 bytes, bool streaming) {
  if (!streaming || bytes < line_bytes) {
    std::memcpy(to, from, bytes);
  } else if (bytes <= ahead_bytes) {
    stream_run(to, from, bytes, from);
  } else {
    stream_long_run(to, from, bytes, from + bytes - ahead_bytes);
  }
}

// Where some runs lie: fills `list` with runs first .. last - 1. The only part that knows addresses, so the
// only part that is compiled for each kind of run.
typedef void (*Fill)(const void* place, u64 first, u64 last, Copy* list);

struct Runs {
  Fill fill;
  const void* place;
  u64 bytes;  // of each run
  bool streaming;
};

constexpr u64 chunk_runs = 256;  // listed at a time
constexpr u64 most_ahead = ahead_bytes / line_bytes;

// Copies runs first .. last - 1, each whole.
inline __attribute__((noinline)) void copy_runs(const Runs& runs, u64 first, u64 last) {
  Copy list[chunk_runs + most_ahead];
  const u64 distance = runs.bytes > ahead_bytes ? 1 : least(i64(ahead_bytes / runs.bytes), i64(most_ahead));
  for (u64 start = first; start < last; start += chunk_runs) {
    const u64 count = last - start < chunk_runs ? last - start : chunk_runs;
    const u64 listed = last - start < chunk_runs + distance ? last - start : chunk_runs + distance;
    runs.fill(runs.place, start, start + listed, list);
    for (u64 i = 0; i < count; ++i) {
      if (!runs.streaming) {
        std::memcpy(list[i].to, list[i].from, runs.bytes);
        continue;
      }
      const char* next = list[i + distance < listed ? i + distance : i].from;
      if (runs.bytes > ahead_bytes) {
        stream_long_run(list[i].to, list[i].from, runs.bytes, next);
      } else {
        stream_run(list[i].to, list[i].from, runs.bytes, next);
      }
    }
  }
  if (runs.streaming) copy_fence();
}

// Copies pieces first .. last - 1 of runs that are cut into `pieces` each.
inline __attribute__((noinline)) void copy_pieces(const Runs& runs, u64 pieces, u64 first, u64 last) {
  for (u64 i = first; i < last; ++i) {
    Copy run;
    runs.fill(runs.place, i / pieces, i / pieces + 1, &run);
    const u64 at = i % pieces * piece_bytes;
    const u64 size = runs.bytes - at < piece_bytes ? runs.bytes - at : piece_bytes;
    copy_run(run.to + at, run.from + at, size, runs.streaming);
  }
  if (runs.streaming) copy_fence();
}

template <class Work>
struct Share {
  Work* work;
  u64 first;
  u64 last;

  static void* run(void* argument) {
    Share* share = static_cast<Share*>(argument);
    (*share->work)(share->first, share->last);
    return nullptr;
  }
};

// Runs `work(first, last)` over 0 .. units - 1 on up to `threads` threads, the caller's being one of them.
// Returns when all is done. A thread that the system refuses is replaced by the caller: same result.
template <class Work>
inline void parallel(u64 units, u32 threads, Work work) {
  u64 count = threads < max_threads ? threads : max_threads;
  if (count > units) count = units;
  if (count <= 1) {
    if (units != 0) work(u64{0}, units);
    return;
  }
  Share<Work> shares[max_threads];
  pthread_t ids[max_threads];
  bool started[max_threads];
  const u64 quotient = units / count;
  const u64 remainder = units % count;
  u64 first = 0;
  for (u64 k = 0; k < count; ++k) {
    const u64 last = first + quotient + (k < remainder ? 1 : 0);
    shares[k] = Share<Work>{&work, first, last};
    started[k] = k != 0 && pthread_create(&ids[k], nullptr, Share<Work>::run, &shares[k]) == 0;
    first = last;
  }
  for (u64 k = 0; k < count; ++k) {
    if (!started[k]) Share<Work>::run(&shares[k]);
  }
  for (u64 k = 1; k < count; ++k) {
    if (started[k]) pthread_join(ids[k], nullptr);
  }
}

inline __attribute__((noinline)) void copy_listed(const Runs& runs, u64 count, u32 threads) {
  const u64 worth = count * runs.bytes / thread_bytes + 1;
  const u32 used = worth < threads ? static_cast<u32>(worth) : threads;
  if (runs.bytes <= piece_bytes) {
    parallel(count, used, [&runs](u64 first, u64 last) { copy_runs(runs, first, last); });
    return;
  }
  const u64 pieces = (runs.bytes + piece_bytes - 1) / piece_bytes;
  parallel(count * pieces, used, [&runs, pieces](u64 first, u64 last) { copy_pieces(runs, pieces, first, last); });
}

template <class Place>
inline void fill_from(const void* place, u64 first, u64 last, Copy* list) {
  for (u64 i = first; i < last; ++i) *list++ = (*static_cast<const Place*>(place))(i);
}

// Copies `runs` runs of `bytes` each on up to `threads` threads; `place(i)` is the `Copy` of number i.
// Visible to all when it returns.
template <class Place>
inline void copy_all(u64 runs, u64 bytes, u32 threads, bool streaming, Place place) {
  if (runs == 0 || bytes == 0) return;
  copy_listed(Runs{fill_from<Place>, &place, bytes, streaming}, runs, threads);
}

}  // namespace pw
