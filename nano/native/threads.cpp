// The pool behind parallel_for. Loaded once, with global symbols, before any kernel.
//
// Owns: the worker threads and the one job that they share. A job's tasks are claimed through `ticket`,
// which holds the job's number and the range of tasks that is left in one word: a claim succeeds only
// while that very job is open, so a thread that wakes late can never touch a job that is over.
//
// The caller and every other worker claim from the front, the rest from the back. So of two threads each gets
// about the same half of every job, and finds what it wrote for one in its own caches when it reads it in
// the next: where two cores share no cache, 1 to 5 % of a step (docs/log.md, "From both ends").
#include "threads.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int INDEX_BITS = 20;
constexpr uint64_t INDEX_MASK = (1u << INDEX_BITS) - 1;
constexpr long SPIN_NS = 300 * 1000;           // covers what lies between two kernels of a step
constexpr long HOLD_NS = 10 * 1000;            // of that, without offering the core to others
constexpr int SPINS_PER_LOOK = 64;             // pauses between two looks at the clock
constexpr long STALL_NS = 50 * 1000;           // nobody waits so much longer for a task than it takes, unless
                                               // its thread has lost its core to another process
constexpr long LOST_NS = 4000 * 1000;          // lost by stalls beyond one part of the time in
constexpr long TOLERATED = 5;                  // TOLERATED: cores are left to others
constexpr long MIN_POLITE_NS = 20 * 1000000;   // for so long, and twice as long each time if it soon
constexpr long MAX_POLITE_NS = 640 * 1000000;  // happens again
constexpr long POLITE_WAKE_NS = 200 * 1000;    // meanwhile only jobs that take longer wake anybody

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

long now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000L + t.tv_nsec;
}

struct alignas(64) Pool {
  std::atomic<uint64_t> ticket{0};  // job number | end of the tasks that are left | the first of them
  alignas(64) std::atomic<long> num_done{0};
  void (*body)(void*, long, long) = nullptr;
  void* arg = nullptr;
  alignas(64) std::atomic<uint32_t> wakeups{0};  // what sleeping workers wait on
  std::atomic<int> num_asleep{0};
  std::atomic<int> num_threads{1};
  std::atomic<int> num_started{1};  // threads that exist, the caller included
  std::atomic<long> polite_until{0};
  long polite_ns = 0, lost_ns = 0, last_stall = 0;  // of whoever holds is_busy
  std::atomic<bool> is_busy{false};
};

Pool& pool() {
  static Pool* instance = new Pool;  // never destroyed: workers outlive every destructor
  return *instance;
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
  word.wait(value);
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
#else
  word.notify_all();
#endif
}

// Tasks of a ticket's job that nobody has claimed: [first_left, end_left).
long first_left(uint64_t ticket) { return (long)(ticket & INDEX_MASK); }
long end_left(uint64_t ticket) { return (long)((ticket >> INDEX_BITS) & INDEX_MASK); }
long num_left(uint64_t ticket) { return end_left(ticket) - first_left(ticket); }

bool is_polite(Pool& p, long now) { return now < p.polite_until.load(std::memory_order_relaxed); }

void wake_workers(Pool& p) {
  if (!p.num_asleep.load(std::memory_order_seq_cst)) return;
  p.wakeups.fetch_add(1, std::memory_order_release);
  wake_all(p.wakeups);
}

// Claim and run tasks of the open job until none is left; how many it were. While some are left after a
// claim, `meanwhile` is called. A claim takes a share of what is left: neighbouring tasks, which often read
// on in memory where the last one ended, and single ones in the end, so that all threads end together.
template <class Meanwhile>
long work(Pool& p, bool from_back, Meanwhile meanwhile) {
  const long shares = 2 * p.num_threads.load(std::memory_order_relaxed);
  long num_run = 0;
  uint64_t ticket = p.ticket.load(std::memory_order_acquire);
  while (num_left(ticket)) {
    const long count = std::max(1L, num_left(ticket) / shares);
    const uint64_t rest = from_back ? ticket - ((uint64_t)count << INDEX_BITS) : ticket + count;
    if (!p.ticket.compare_exchange_weak(ticket, rest, std::memory_order_acq_rel)) continue;
    // The job stays open until these tasks are counted, so body and arg are its own.
    const long first = from_back ? end_left(rest) : first_left(ticket);
    p.body(p.arg, first, first + count);
    num_run += count;
    p.num_done.fetch_add(count, std::memory_order_acq_rel);
    ticket = p.ticket.load(std::memory_order_acquire);
    if (num_left(ticket)) meanwhile();
  }
  return num_run;
}

// A job waited `waited` for a thread that another process had stopped in the middle of a task. If that
// goes on, the caller had better compute alone for some time.
void note_stall(Pool& p, long now, long waited) {
  p.lost_ns = std::max(0L, p.lost_ns - (now - p.last_stall) / TOLERATED) + waited;
  p.last_stall = now;
  if (p.lost_ns < LOST_NS) return;
  const bool is_again = now - p.polite_until.load(std::memory_order_relaxed) < p.polite_ns;
  p.polite_ns = is_again ? std::min(2 * p.polite_ns, MAX_POLITE_NS) : MIN_POLITE_NS;
  p.polite_until.store(now + p.polite_ns, std::memory_order_relaxed);
  p.lost_ns = 0;
}

// Spin until `is_over`; false after `most_ns`. Who else wants this core, perhaps the very thread that is
// waited for, soon gets it.
template <class IsOver>
bool spin(long most_ns, IsOver is_over) {
  const long start = now_ns();
  for (long spent = 0; spent < most_ns; spent = now_ns() - start) {
    for (int i = 0; i < SPINS_PER_LOOK; i++) {
      if (is_over()) return true;
      pause();
    }
    if (spent > HOLD_NS) sched_yield();
  }
  return is_over();
}

// Wait until every task is done. What is left is in other threads' hands.
template <class IsOver>
void wait(Pool& p, long start, long num_own, IsOver is_over) {
  if (is_over()) return;
  const long since = now_ns();
  while (!spin(SPIN_NS, is_over)) {
  }
  // Tasks may be long by themselves: the caller's own tell how long.
  const long now = now_ns(), waited = now - since;
  if (num_own && waited > STALL_NS + 2 * (since - start) / num_own) note_stall(p, now, waited);
}

void worker_loop(int index) {
  Pool& p = pool();
  for (;;) {
    const bool is_used = index < p.num_threads.load(std::memory_order_relaxed);
    if (is_used) {
      work(p, index % 2, [] {});
      const long most_ns = is_polite(p, now_ns()) ? 0 : SPIN_NS;
      if (spin(most_ns, [&] { return num_left(p.ticket.load(std::memory_order_relaxed)); })) continue;
    }
    const uint32_t seen = p.wakeups.load(std::memory_order_acquire);
    p.num_asleep.fetch_add(1, std::memory_order_seq_cst);
    // Announced first, looked at afterwards: the caller publishes first and looks afterwards.
    if (!is_used || !num_left(p.ticket.load(std::memory_order_seq_cst))) sleep_while(p.wakeups, seen);
    p.num_asleep.fetch_sub(1, std::memory_order_relaxed);
  }
}

}  // namespace

extern "C" {

// Compute on `num_threads` threads from now on, the caller's included; on fewer if the system has no more.
// Not during a job.
void nano_set_num_threads(int num_threads) {
  Pool& p = pool();
  int num_started = p.num_started.load();
  try {
    for (; num_started < num_threads; num_started++) std::thread(worker_loop, num_started).detach();
  } catch (const std::system_error&) {
  }
  p.num_started.store(num_started);
  p.num_threads.store(std::clamp(num_threads, 1, num_started));
}

int nano_num_threads() { return pool().num_threads.load(std::memory_order_relaxed); }

void nano_parallel_for(long num_tasks, void (*body)(void*, long, long), void* arg) {
  Pool& p = pool();
  const bool is_alone = num_tasks <= 1 || p.num_threads.load(std::memory_order_relaxed) == 1 ||
                        num_tasks > (long)INDEX_MASK;
  if (is_alone || p.is_busy.exchange(true, std::memory_order_acquire)) {
    if (num_tasks > 0) body(arg, 0, num_tasks);
    return;
  }
  p.body = body;
  p.arg = arg;
  p.num_done.store(0, std::memory_order_relaxed);
  const uint64_t job = (p.ticket.load(std::memory_order_relaxed) >> (2 * INDEX_BITS)) + 1;
  p.ticket.store(job << (2 * INDEX_BITS) | (uint64_t)num_tasks << INDEX_BITS,
                 std::memory_order_seq_cst);
  const long start = now_ns();
  bool has_woken = !is_polite(p, start);
  if (has_woken) wake_workers(p);
  const long num_own = work(p, false, [&] {
    if (has_woken || now_ns() - start < POLITE_WAKE_NS) return;
    wake_workers(p);
    has_woken = true;
  });
  wait(p, start, num_own, [&] { return p.num_done.load(std::memory_order_acquire) == num_tasks; });
  p.is_busy.store(false, std::memory_order_release);
}
}
