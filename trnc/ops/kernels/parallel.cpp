#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace trnc {
namespace {

constexpr auto kSpin = std::chrono::microseconds(200);  // gaps between the ops of a step are shorter
constexpr int64_t kSpansPerThread = 4;                  // lets a thread that lost its core fall behind
constexpr uint32_t kClosed = 0xffffffffu;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// One job at a time. `ticket_` holds (job number << 32 | next span): a worker reads the job's fields and
// then claims a span by compare-and-swap, which fails if the job changed meanwhile. So the caller waits
// only for spans that were claimed, never for a worker that sleeps, and a forked child without workers
// simply does all spans itself.
class Pool {
 public:
  Pool() { resize(static_cast<int>(std::max(1u, std::thread::hardware_concurrency()))); }

  int size() const { return size_.load(std::memory_order_relaxed); }

  void resize(int n) {
    std::lock_guard<std::mutex> lock(spawning_);
    for (; spawned_ < n - 1; ++spawned_) {
      std::thread([this, index = spawned_ + 1] { work(index); }).detach();
    }
    size_.store(n, std::memory_order_relaxed);
  }

  void run(int64_t n, int64_t grain, detail::Body body, void* context) {
    const int64_t spans_wanted = size() * kSpansPerThread;
    const int64_t span = grain * std::max<int64_t>(1, n / (grain * spans_wanted));
    if (size() == 1 || span >= n || busy_.exchange(true, std::memory_order_acquire)) {
      body(context, 0, n);
      return;
    }
    const uint32_t spans = static_cast<uint32_t>((n + span - 1) / span);
    open(n, span, spans, body, context);
    help();
    for (int tries = 0; done_.load(std::memory_order_acquire) != spans; ++tries) {
      if (tries < 4096) pause(); else std::this_thread::yield();
    }
    busy_.store(false, std::memory_order_release);
  }

 private:
  void open(int64_t n, int64_t span, uint32_t spans, detail::Body body, void* context) {
    const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(job << 32 | kClosed, std::memory_order_relaxed);
    n_.store(n, std::memory_order_release);
    span_.store(span, std::memory_order_release);
    body_.store(body, std::memory_order_release);
    context_.store(context, std::memory_order_release);
    done_.store(0, std::memory_order_release);
    spans_.store(spans, std::memory_order_release);
    ticket_.store(job << 32, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      wake_.fetch_add(1, std::memory_order_seq_cst);
      wake_.notify_all();
    }
  }

  // Claims and runs spans until none is left.
  void help() {
    for (;;) {
      uint64_t ticket = ticket_.load(std::memory_order_acquire);
      const uint32_t index = static_cast<uint32_t>(ticket);
      const int64_t n = n_.load(std::memory_order_acquire);
      const int64_t span = span_.load(std::memory_order_acquire);
      const detail::Body body = body_.load(std::memory_order_acquire);
      void* const context = context_.load(std::memory_order_acquire);
      if (index == kClosed || index >= spans_.load(std::memory_order_acquire)) return;
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      const int64_t begin = index * span;
      body(context, begin, std::min(n, begin + span));
      done_.fetch_add(1, std::memory_order_acq_rel);
    }
  }

  bool has_work() const {
    const uint32_t index = static_cast<uint32_t>(ticket_.load(std::memory_order_seq_cst));
    return index != kClosed && index < spans_.load(std::memory_order_acquire);
  }

  void work(int index) {
    auto idle_since = std::chrono::steady_clock::now();
    for (;;) {
      const bool active = index < size();
      if (active && has_work()) {
        help();
        idle_since = std::chrono::steady_clock::now();
      } else if (active && std::chrono::steady_clock::now() - idle_since < kSpin) {
        for (int i = 0; i < 16 && !has_work(); ++i) pause();
      } else {
        sleep(active);
        idle_since = std::chrono::steady_clock::now();
      }
    }
  }

  void sleep(bool active) {
    const uint32_t before = wake_.load(std::memory_order_seq_cst);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    if (!active || !has_work()) wake_.wait(before, std::memory_order_seq_cst);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

  std::mutex spawning_;
  int spawned_ = 0;
  std::atomic<int> size_{1};
  std::atomic<bool> busy_{false};  // a job is running
  std::atomic<int64_t> n_{0}, span_{0};
  std::atomic<detail::Body> body_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<uint32_t> spans_{0};
  alignas(64) std::atomic<uint64_t> ticket_{kClosed};
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<uint32_t> sleepers_{0}, wake_{0};
};

Pool& pool() {
  static Pool& pool = *new Pool;  // never destroyed: its threads end with the process
  return pool;
}

}  // namespace

int num_threads() { return pool().size(); }
void set_num_threads(int n) { pool().resize(n); }

namespace detail {
void parallel_for(int64_t n, int64_t grain, Body body, void* context) {
  if (n > 0) pool().run(n, grain, body, context);
}
}  // namespace detail
}  // namespace trnc
