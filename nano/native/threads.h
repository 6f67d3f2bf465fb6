// parallel_for: the one way our kernels use more than one core.
//
// Why not OpenMP: its barrier waits for every thread, so with one other busy process on the machine a
// step of 150 parallel regions takes fifty times as long (or, if threads sleep at once, a third
// longer on an idle machine). Here tasks are claimed one by one, a thread that is late is not waited
// for, and spinning stops while the machine is contended.
#pragma once

#include <type_traits>

extern "C" {
// Run body(arg, task) for every task in [0, num_tasks), on all threads; returns when all are done.
// Tasks may run in any order, and must not call this. One caller at a time; a second computes alone.
void nano_parallel_for(long num_tasks, void (*body)(void* arg, long task), void* arg);
int nano_num_threads();
}

template <class Body>
inline void parallel_for(long num_tasks, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  nano_parallel_for(
      num_tasks, [](void* arg, long task) { (*static_cast<Plain*>(arg))(task); },
      const_cast<void*>(static_cast<const void*>(&body)));
}
