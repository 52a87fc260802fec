// Runs tasks on the threads of torch's OpenMP pool where that is known, else on threads of its own.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kdn {

// Calls task(context, index) for every index in [0, count), in no particular order, on up to `threads`
// threads. Which thread runs a task must not matter to its result.
void parallel(int64_t count, int threads, void (*task)(void* context, int64_t index), void* context);

template <typename Task>
void parallel(int64_t count, int threads, Task&& task) {
  parallel(
      count, threads, [](void* context, int64_t index) { (*static_cast<Task*>(context))(index); },
      const_cast<void*>(static_cast<const void*>(&task)));
}

// At least `count` floats, aligned to 64 bytes, private to this thread until its next call.
float* scratch(size_t count);

}  // namespace kdn
