// The pool behind parallel_for. Loaded once, with global symbols, before any kernel.
//
// Owns: the worker threads and the one job that they share. A job is claimed task by task through
// `ticket`, which holds the job's number, its size and the next task in one word: a claim succeeds
// only while that very job is open, so a thread that wakes late can never touch a job that is over.
#include "threads.h"

#include <sched.h>
#include <sys/resource.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int INDEX_BITS = 20;
constexpr uint64_t INDEX_MASK = (1u << INDEX_BITS) - 1;
constexpr long SPIN_NS = 300 * 1000;              // covers what lies between two kernels of a step
constexpr long POLITE_NS = 100 * 1000 * 1000;     // no spinning for so long once preempted
constexpr int SPINS_PER_LOOK = 64;                // pauses between two looks at the clock
constexpr int CHECK_EVERY = 16;                   // jobs between two looks at the preemption count
constexpr long PREEMPTIONS = 2;                   // within CHECK_EVERY jobs: the machine is contended

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

// How often this thread lost its core to another process.
long preemptions() {
#if defined(RUSAGE_THREAD)
  rusage usage;
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nivcsw;
#else
  return 0;
#endif
}

struct alignas(64) Pool {
  std::atomic<uint64_t> ticket{0};  // job number | num_tasks | next task
  alignas(64) std::atomic<long> num_done{0};
  void (*body)(void*, long) = nullptr;
  void* arg = nullptr;
  alignas(64) std::atomic<uint32_t> wakeups{0};  // what sleeping workers wait on
  std::atomic<int> num_asleep{0};
  std::atomic<int> num_threads{1};
  std::atomic<int> num_started{1};  // threads that exist, the caller included
  std::atomic<long> polite_until{0};
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

bool has_work(uint64_t ticket) {
  return (ticket & INDEX_MASK) < ((ticket >> INDEX_BITS) & INDEX_MASK);
}

// Claim and run tasks of the open job until none is left.
void work(Pool& p) {
  uint64_t ticket = p.ticket.load(std::memory_order_acquire);
  while (has_work(ticket)) {
    if (!p.ticket.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
    // The job stays open until this task is counted, so body and arg are its own.
    p.body(p.arg, (long)(ticket & INDEX_MASK));
    p.num_done.fetch_add(1, std::memory_order_acq_rel);
    ticket = p.ticket.load(std::memory_order_acquire);
  }
}

// Counts preemptions of the calling thread; says when they are too many.
struct Courtesy {
  long seen = preemptions();
  int jobs = 0;

  void look(Pool& p) {
    if (++jobs % CHECK_EVERY) return;
    const long count = preemptions();
    if (count - seen >= PREEMPTIONS) p.polite_until.store(now_ns() + POLITE_NS);
    seen = count;
  }
};

// Spin until `is_over`, at most SPIN_NS, and not at all while the machine is contended.
template <class IsOver>
bool spin(Pool& p, IsOver is_over) {
  const long start = now_ns();
  if (start < p.polite_until.load(std::memory_order_relaxed)) return is_over();
  do {
    for (int i = 0; i < SPINS_PER_LOOK; i++) {
      if (is_over()) return true;
      pause();
    }
  } while (now_ns() - start < SPIN_NS);
  return false;
}

void worker_loop(int index) {
  Pool& p = pool();
  Courtesy courtesy;
  for (;;) {
    const bool is_used = index < p.num_threads.load(std::memory_order_relaxed);
    if (is_used) {
      work(p);
      courtesy.look(p);
      if (spin(p, [&] { return has_work(p.ticket.load(std::memory_order_relaxed)); })) continue;
    }
    const uint32_t seen = p.wakeups.load(std::memory_order_acquire);
    p.num_asleep.fetch_add(1, std::memory_order_seq_cst);
    // Announced first, looked at afterwards: the caller publishes first and looks afterwards.
    if (!is_used || !has_work(p.ticket.load(std::memory_order_seq_cst))) sleep_while(p.wakeups, seen);
    p.num_asleep.fetch_sub(1, std::memory_order_relaxed);
  }
}

}  // namespace

extern "C" {

// Compute on `num_threads` threads from now on, the caller's included. Not during a job.
void nano_set_num_threads(int num_threads) {
  Pool& p = pool();
  p.num_threads.store(std::max(1, num_threads));
  while (p.num_started.load() < p.num_threads.load())
    std::thread(worker_loop, p.num_started.fetch_add(1)).detach();
}

int nano_num_threads() { return pool().num_threads.load(std::memory_order_relaxed); }

void nano_parallel_for(long num_tasks, void (*body)(void*, long), void* arg) {
  Pool& p = pool();
  const bool is_alone = num_tasks <= 1 || p.num_threads.load(std::memory_order_relaxed) == 1 ||
                        num_tasks > (long)INDEX_MASK;
  if (is_alone || p.is_busy.exchange(true, std::memory_order_acquire)) {
    for (long task = 0; task < num_tasks; task++) body(arg, task);
    return;
  }
  static thread_local Courtesy courtesy;
  p.body = body;
  p.arg = arg;
  p.num_done.store(0, std::memory_order_relaxed);
  const uint64_t job = (p.ticket.load(std::memory_order_relaxed) >> (2 * INDEX_BITS)) + 1;
  p.ticket.store(job << (2 * INDEX_BITS) | (uint64_t)num_tasks << INDEX_BITS,
                 std::memory_order_seq_cst);
  if (p.num_asleep.load(std::memory_order_seq_cst)) {
    p.wakeups.fetch_add(1, std::memory_order_release);
    wake_all(p.wakeups);
  }
  work(p);
  // What is left is in another thread's hands; if that thread lost its core, so may we.
  auto is_over = [&] { return p.num_done.load(std::memory_order_acquire) == num_tasks; };
  while (!is_over())
    if (!spin(p, is_over)) sched_yield();
  courtesy.look(p);
  p.is_busy.store(false, std::memory_order_release);
}
}
