// The pool that every kernel runs on. Code that the compiler generates is single-threaded, so this is
// the only parallelism inside a step.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace trnc {

int num_threads();

// Takes effect from the next parallel_for on; n >= 1.
void set_num_threads(int n);

namespace detail {
using Body = void (*)(void* context, int64_t begin, int64_t end);
void parallel_for(int64_t n, int64_t grain, Body body, void* context);
}  // namespace detail

// Calls fn(begin, end) on spans that cover 0..n-1 once each, and returns when all are done. Spans are
// multiples of `grain` (the last may be short) and are claimed by threads as they come free, the caller
// among them: a result must not depend on who computes what. A nested call, or one made while another
// thread's is running, runs in its caller alone. fn must not throw.
template <class Fn>
void parallel_for(int64_t n, int64_t grain, Fn&& fn) {
  using F = std::remove_reference_t<Fn>;
  detail::parallel_for(
      n, grain,
      [](void* context, int64_t begin, int64_t end) { (*static_cast<F*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(std::addressof(fn))));
}

}  // namespace trnc
