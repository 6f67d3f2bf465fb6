// parallel_for: the one way our kernels use more than one core.
//
// Why not OpenMP: its barrier waits for every thread, so with one other busy process on the machine a
// step of 150 parallel regions takes fifty times as long (or, if threads sleep at once, a third longer on
// an idle machine). Here threads claim tasks in shrinking shares, a thread that is late is not waited for,
// and while others keep taking its core the caller computes alone. Half of the threads begin with the first
// tasks and half with the last: tasks in the order of what they read and write stay with their cores.
#pragma once

#include <type_traits>

extern "C" {
// Run body(arg, first, last) for ranges that together are the tasks [0, num_tasks), on all threads; returns
// when all are done. Ranges run in any order. One caller at a time; a second one, or a task, computes alone.
void nano_parallel_for(long num_tasks, void (*body)(void* arg, long first, long last), void* arg);
int nano_num_threads();
}

// body(first, last): for tasks that are cheaper together, as those that read on where the last one ended.
template <class Body>
inline void parallel_for_ranges(long num_tasks, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  nano_parallel_for(
      num_tasks,
      [](void* arg, long first, long last) { (*static_cast<Plain*>(arg))(first, last); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// body(task)
template <class Body>
inline void parallel_for(long num_tasks, Body&& body) {
  parallel_for_ranges(num_tasks, [&](long first, long last) {
    for (long task = first; task < last; task++) body(task);
  });
}
