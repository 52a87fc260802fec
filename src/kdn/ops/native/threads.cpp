#include "threads.h"

#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#include "kdn.h"

namespace kdn {
namespace {

// The entry of the GNU OpenMP runtime that torch has loaded. Sharing its pool means that our threads do not
// compete with torch's, which keep spinning for a while after a parallel region.
using GompParallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);
GompParallel gomp_parallel = nullptr;

struct Job {
  int64_t count;
  void (*task)(void*, int64_t);
  void* context;
  std::atomic<int64_t> next{0};
};

void work(void* pointer) {
  Job& job = *static_cast<Job*>(pointer);
  for (int64_t i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.count;)
    job.task(job.context, i);
}

struct Scratch {
  float* data = nullptr;
  size_t size = 0;
  ~Scratch() { std::free(data); }
};

}  // namespace

void parallel(int64_t count, int threads, void (*task)(void*, int64_t), void* context) {
  Job job{count, task, context};
  if (threads > count) threads = static_cast<int>(count);
  if (threads <= 1) {
    work(&job);
  } else if (gomp_parallel != nullptr) {
    gomp_parallel(work, &job, static_cast<unsigned>(threads), 0);
  } else {
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(work, &job);
    work(&job);
    for (std::thread& other : others) other.join();
  }
}

float* scratch(size_t count) {
  thread_local Scratch mine;
  if (mine.size < count) {
    std::free(mine.data);
    mine.size = 0;
    // Rounded up to a page, as aligned_alloc wants a multiple of the alignment.
    const size_t bytes = (count * sizeof(float) + 4095) / 4096 * 4096;
    mine.data = static_cast<float*>(std::aligned_alloc(64, bytes));
    if (mine.data == nullptr) throw std::bad_alloc();
    mine.size = bytes / sizeof(float);
  }
  return mine.data;
}

}  // namespace kdn

extern "C" void kdn_set_threads(void* entry) {
  kdn::gomp_parallel = reinterpret_cast<kdn::GompParallel>(entry);
}
