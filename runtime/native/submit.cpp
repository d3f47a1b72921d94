// What a submission does for every id, once for a whole list, and what it asks of the driver at its begin and end.
//
// A caller holds the interpreter's lock during `pages_of`, which marks pages in memory that all calls share.
#include <cstdint>

using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i64 = std::int64_t;

namespace {

// What ids may be, by side (0: host, 1: device): `pages` of them; `marks` has a bit for each page, all zero.
struct Side {
  u64 pages;
  u64* marks;
};

struct Limits {
  u64 page_size;
  Side sides[2];
  u64 reserved_count;
  const u64* reserved;  // device pages
  const unsigned char* taken;  // a byte for each host page, not 0 where it is allocated
};

// What is wrong, as `pages_of` tells it; the device's number is the host's and one.
enum Wrong : i64 { not_whole = -1, outside = -2, reserved = -4, twice = -5, idle = -7 };

enum Ask : u64 { host_wide = 1, device_wide = 2, by_token = 4, host_once = 8, device_once = 16, allocated = 32 };

// Page ids of whole pages of `size` ids each, which stand together and in order. An id that is no page number
// of 32 bits becomes one that is outside of every pool.
template <typename T>
bool pack(const T* ids, u64 count, u64 size, u32* out) {
  if (size == 1) {
    for (u64 i = 0; i < count; ++i) out[i] = u64(ids[i]) > ~u32(0) ? ~u32(0) : u32(ids[i]);
    return true;
  }
  for (u64 i = 0; i < count; ++i) {
    const T* page = ids + i * size;
    const T first = page[0];
    bool same = first % T(size) == 0;
    for (u64 j = 1; j < size; ++j) same &= page[j] == T(u64(first) + j);
    if (!same) return false;
    const i64 number = i64(first) / i64(size);
    out[i] = number < 0 || number > i64(~u32(0)) ? ~u32(0) : u32(number);
  }
  return true;
}

bool pack(const void* ids, bool wide, u64 count, u64 size, u32* out) {
  return wide ? pack(static_cast<const i64*>(ids), count, size, out)
              : pack(static_cast<const std::int32_t*>(ids), count, size, out);
}

bool inside(const u32* ids, u64 count, u64 end) {
  u32 most = 0;
  for (u64 i = 0; i < count; ++i) most = ids[i] > most ? ids[i] : most;
  return count == 0 || most < end;
}

// Marks every page; how many there are, each counted once.
u64 mark(const Side& side, const u32* ids, u64 count) {
  u64 different = 0;
  for (u64 i = 0; i < count; ++i) {
    u64& word = side.marks[ids[i] >> 6];
    const u64 bit = u64(1) << (ids[i] & 63);
    different += (word & bit) == 0;
    word |= bit;
  }
  return different;
}

void unmark(const Side& side, const u32* ids, u64 count) {
  for (u64 i = 0; i < count; ++i) side.marks[ids[i] >> 6] = 0;
}

// Runs of neighbouring pages among those that are marked. Each page is counted when it is the first of a run,
// or by whoever stands in the list again.
u64 runs_of(const Side& side, const u32* ids, u64 count) {
  u64 runs = 0;
  for (u64 i = 0; i < count; ++i) {
    const u64 before = u64(ids[i]) - 1;
    runs += ids[i] == 0 || (side.marks[before >> 6] >> (before & 63) & 1) == 0;
  }
  return runs;
}

// What `pages_of` is asked: `count` pages of both lists (`device` null: of the host's alone).
struct Question {
  const Limits* limits;
  const void *host, *device;
  u64 count, ask;
  u32* out;
};

}  // namespace

// Checks pages and writes their numbers to `out`, the host's first. Returns how many runs of neighbouring host pages
// there are, or what is wrong.
extern "C" i64 pages_of(const Question* question) {
  const auto [limits, host, device, count, ask, out] = *question;
  const u64 size = ask & by_token ? limits->page_size : 1;
  u32* const there = out + count;
  if (!pack(host, ask & host_wide, count, size, out)) return not_whole;
  if (device && !pack(device, ask & device_wide, count, size, there)) return not_whole;
  if (!inside(out, count, limits->sides[0].pages)) return outside;
  if (device) {
    if (!inside(there, count, limits->sides[1].pages)) return outside - 1;
    for (u64 r = 0; r < limits->reserved_count; ++r) {
      for (u64 i = 0; i < count; ++i) {
        if (there[i] == limits->reserved[r]) return reserved;
      }
    }
  }
  if (ask & allocated) {
    for (u64 i = 0; i < count; ++i) {
      if (!limits->taken[out[i]]) return idle;
    }
  }
  const bool host_again = mark(limits->sides[0], out, count) != count;
  const i64 runs = i64(runs_of(limits->sides[0], out, count));
  unmark(limits->sides[0], out, count);
  if (host_again && ask & host_once) return twice;
  if (ask & device_once) {
    const bool again = mark(limits->sides[1], there, count) != count;
    unmark(limits->sides[1], there, count);
    if (again) return twice - 1;
  }
  return runs;
}

// ---- the last submission that touched a page -------------------------------------------------------------

namespace {

// A number for each of `room` pages, and pages.
struct Stamped {
  u64* numbers;
  u64 room;
  const u32* ids;
  u64 count, number;
};

}  // namespace

// Sets the numbers of pages, up to `room`. Returns how many numbers there have to be for all.
extern "C" u64 stamp(const Stamped* stamped) {
  const auto [numbers, room, ids, count, number] = *stamped;
  u64 needed = 0;
  for (u64 i = 0; i < count; ++i) {
    needed = ids[i] >= needed ? u64(ids[i]) + 1 : needed;
    if (ids[i] < room) numbers[ids[i]] = number;
  }
  return needed;
}

// The largest number of these pages; 0 for those that have none.
extern "C" u64 latest(const Stamped* stamped) {
  const auto [numbers, room, ids, count, number] = *stamped;
  u64 most = 0;
  for (u64 i = 0; i < count; ++i) {
    if (ids[i] < room && numbers[ids[i]] > most) most = numbers[ids[i]];
  }
  return most;
}

// ---- pages that go through staging memory ----------------------------------------------------------------

namespace {

// A run of bytes that every page has: of page p `nbytes` from `start` + p * `step` on in host memory; of the page
// at position i of a slot from `inside` + i * `inside_step` on.
struct Run {
  u64 start, step, inside, inside_step, nbytes;
};

// Host memory from `origin` on, with addresses that no copy crosses, ascending.
struct Host {
  u64 origin, border_count;
  const u64* borders;
};

// Copies, in three rows of `room` numbers; those that have no room are counted and not written.
struct Copies {
  u64 *host, *slot, *sizes, room, count;
  // In pieces that end at borders.
  void add(u64 at, u64 in_slot, u64 nbytes, const Host& memory) {
    u64 low = 0, high = memory.border_count;  // the first border behind `at`
    while (low < high) {
      const u64 middle = (low + high) / 2;
      if (memory.borders[middle] <= at) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    for (; low < memory.border_count && memory.borders[low] < at + nbytes; ++low) {
      const u64 size = memory.borders[low] - at;
      put(at, in_slot, size);
      at += size, in_slot += size, nbytes -= size;
    }
    put(at, in_slot, nbytes);
  }
  void put(u64 at, u64 in_slot, u64 nbytes) {
    if (count < room) host[count] = at, slot[count] = in_slot, sizes[count] = nbytes;
    ++count;
  }
};

}  // namespace

// Brings `count` host pages and behind them the device's, pair by pair, in the order of the host's. `room`: as many
// numbers again. Digit by digit from the lowest; digits that all pages share are left out.
extern "C" void in_host_order(u32* ids, u64 count, u32* room) {
  u32 any = 0, all = ~u32(0);
  for (u64 i = 0; i < count; ++i) any |= ids[i], all &= ids[i];
  for (u32 shift = 0; shift < 32; shift += 8) {
    if (((any ^ all) >> shift & 255) == 0) continue;
    u64 places[256] = {};
    for (u64 i = 0; i < count; ++i) ++places[ids[i] >> shift & 255];
    u64 before = 0;
    for (u64& place : places) {
      const u64 here = place;
      place = before;
      before += here;
    }
    for (u64 i = 0; i < count; ++i) {
      const u64 at = places[ids[i] >> shift & 255]++;
      room[at] = ids[i], room[count + at] = ids[count + i];
    }
    for (u64 i = 0; i < 2 * count; ++i) ids[i] = room[i];
  }
}

namespace {

// What `copies_of` lists: copies of `count` pages, the first of which is at position `first` of the slot at `base`.
struct Listed {
  const Host* memory;
  const Run* runs;
  u64 run_count;
  const u32* pages;
  u64 count, first, base;
  u64* out;
  u64 room, used;
};

}  // namespace

// Lists copies in three rows of `room` numbers each from `out` + `used` on: host addresses, slot addresses, bytes.
// Neighbouring pages are one copy where their bytes are neighbours on both sides. Returns how many there are then.
extern "C" u64 copies_of(const Listed* listed) {
  const auto [memory, runs, run_count, pages, count, first, base, out, room, used] = *listed;
  Copies copies{out, out + room, out + 2 * room, room, used};
  for (u64 r = 0; r < run_count; ++r) {
    const Run run = runs[r];
    const bool merge = run.nbytes == run.step && run.nbytes == run.inside_step;
    for (u64 i = 0; i < count;) {
      u64 next = i + 1;
      while (merge && next < count && pages[next] == pages[next - 1] + 1) ++next;
      const u64 host = memory->origin + run.start + pages[i] * run.step;
      copies.add(host, base + run.inside + (first + i) * run.inside_step, (next - i) * run.nbytes, *memory);
      i = next;
    }
  }
  return copies.count;
}

// ---- calls of the CUDA driver ----------------------------------------------------------------------------

namespace {

struct Functions {
  int (*capturing)(void* stream, int* status);
  int (*record)(void* event, void* stream);
  int (*wait)(void* stream, void* event, unsigned flags);
  int (*launch)(void* function, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned, unsigned shared,
                void* stream, void** parameters, void** extra);
  int (*copy_in)(u64 to, const void* from, u64 nbytes, void* stream);
  int (*copy_out)(void* to, u64 from, u64 nbytes, void* stream);
  void* batch;          // cuMemcpyBatchAsync; null where the driver has none
  u64 batch_arguments;  // 9 with a place for the index of a failed copy, else 8
};

// What does not change between launches.
struct Kernel {
  void* function;
  u64 block;
  void** parameters;
};

// Copies of bytes in `stream`, host to device where they go `inward`.
struct Batch {
  const u64 *to, *from, *sizes;
  u64 count;
  void* stream;
  u64 inward;
};

// Where a call stopped, above the driver's error in what it returns.
enum Stage : i64 { refused = i64(1) << 32, failed = i64(2) << 32 };

constexpr u64 few_copies = 2;      // one by one are faster than a batch
constexpr u64 batch_limit = 4096;  // descriptors of one call: very long ones have crashed drivers

int each_copy(const Functions& driver, const Batch& batch) {
  for (u64 i = 0; i < batch.count; ++i) {
    const u64 to = batch.to[i], from = batch.from[i], size = batch.sizes[i];
    const int code = batch.inward ? driver.copy_in(to, reinterpret_cast<const void*>(from), size, batch.stream)
                                  : driver.copy_out(reinterpret_cast<void*>(to), from, size, batch.stream);
    if (code != 0) return code;
  }
  return 0;
}

int one_batch(const Functions& driver, const Batch& batch, u64 first, u64 count) {
  using Newer = int (*)(const u64*, const u64*, const u64*, u64, void*, u64*, u64, void*);
  using Older = int (*)(const u64*, const u64*, const u64*, u64, void*, u64*, u64, u64*, void*);
  int attributes[16] = {1};  // sources are read in stream order; as long as those of any version, the rest zero
  u64 from_first_on = 0, bad = 0;
  const u64 *to = batch.to + first, *from = batch.from + first, *sizes = batch.sizes + first;
  return driver.batch_arguments == 9
             ? reinterpret_cast<Older>(driver.batch)(to, from, sizes, count, attributes, &from_first_on, 1, &bad,
                                                     batch.stream)
             : reinterpret_cast<Newer>(driver.batch)(to, from, sizes, count, attributes, &from_first_on, 1,
                                                     batch.stream);
}

int copy_all(const Functions& driver, const Batch& batch) {
  if (batch.count <= few_copies || !driver.batch) return each_copy(driver, batch);
  for (u64 first = 0; first < batch.count; first += batch_limit) {
    const u64 left = batch.count - first;
    const int code = one_batch(driver, batch, first, left < batch_limit ? left : batch_limit);
    if (code != 0) return code;
  }
  return 0;
}

// `stream` behind `other`, by event `between`.
int follow(const Functions& driver, void* stream, void* other, void* between) {
  const int code = driver.record(between, other);
  return code == 0 ? driver.wait(stream, between, 0) : code;
}

int launch_one(const Functions& driver, const Kernel& kernel, void* stream, u64 grid) {
  return driver.launch(kernel.function, unsigned(grid), 1, 1, unsigned(kernel.block), 1, 1, 0, stream,
                       kernel.parameters, nullptr);
}

// A submission to `stream` begins: behind all that is in `other`, and behind event `before` (null: none).
struct Begin {
  const Functions* driver;
  void *between, *stream, *other, *before;
};

// `grid` blocks of a kernel in `stream`, and `event` (null: none) recorded behind them.
struct Launch {
  const Functions* driver;
  const Kernel* kernel;
  void* stream;
  u64 grid;
  void* event;
};

struct Copying {
  const Functions* driver;
  Batch batch;
};

struct Lone {
  Begin begin;
  Launch launch;
};

// A kernel in stream `kernels` and copies in stream `copies`, which come first where they go inward, else last. The
// first of both waits for `free`; `event` is recorded behind the other (null: neither). `rows`: host addresses, slot
// addresses, bytes, `room` numbers each.
struct Relay {
  const Functions* driver;
  const Kernel* kernel;
  u64 grid;
  void *kernels, *copies, *free, *between, *event;
  const u64* rows;
  u64 room, count, inward;
};

}  // namespace

// Returns 0; `refused` when `other` is being captured, or does not say, and nothing was done; `failed`.
extern "C" i64 enter(const Begin* begin) {
  const Functions& driver = *begin->driver;
  int status = 0;
  int code = driver.capturing(begin->other, &status);
  if (code != 0 || status != 0) return refused | code;
  code = follow(driver, begin->stream, begin->other, begin->between);
  if (code == 0 && begin->before) code = driver.wait(begin->stream, begin->before, 0);
  return code == 0 ? 0 : failed | code;
}

// Returns 0; `refused` when it was not launched; `failed` when it was, and the event is not recorded.
extern "C" i64 launch(const Launch* launch) {
  int code = launch_one(*launch->driver, *launch->kernel, launch->stream, launch->grid);
  if (code != 0) return refused | code;
  if (launch->event) code = launch->driver->record(launch->event, launch->stream);
  return code == 0 ? 0 : failed | code;
}

// Both: returns as `enter`; `failed`, too, when it was not launched.
extern "C" i64 launch_behind(const Lone* lone) {
  const i64 entered = enter(&lone->begin);
  if (entered != 0) return entered;
  const i64 found = launch(&lone->launch);
  return found == 0 ? 0 : failed | (found & ~u32(0));
}

// Returns 0 or the driver's error.
extern "C" i64 copies(const Copying* copying) { return copy_all(*copying->driver, copying->batch); }

// Returns 0 or the driver's error.
extern "C" i64 relay(const Relay* relay) {
  const Functions& driver = *relay->driver;
  const bool inward = relay->inward != 0;
  const u64 *host = relay->rows, *slot = host + relay->room, *sizes = slot + relay->room;
  const Batch batch{inward ? slot : host, inward ? host : slot, sizes, relay->count, relay->copies, relay->inward};
  void* const first = inward ? relay->copies : relay->kernels;
  void* const second = inward ? relay->kernels : relay->copies;
  int code = relay->free ? driver.wait(first, relay->free, 0) : 0;
  if (code == 0) code = inward ? copy_all(driver, batch) : launch_one(driver, *relay->kernel, first, relay->grid);
  if (code == 0) code = follow(driver, second, first, relay->between);
  if (code == 0) code = inward ? launch_one(driver, *relay->kernel, second, relay->grid) : copy_all(driver, batch);
  if (code == 0 && relay->event) code = driver.record(relay->event, second);
  return code;
}
