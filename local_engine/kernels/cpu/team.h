// Threads that do one task together. Each takes its next share of the work when it is free, so that a
// preempted thread delays no other share. A thread that is done spins for about as long as waking a
// sleeping one takes, then sleeps. To wake a team costs some 50 us, so one call covers much work. Where
// other processes need the cores, a team waits more than it works: then its caller goes on alone, and
// tries again later.

#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>

namespace sameway {

constexpr uint64_t kSpinCycles = 50'000;           // of the time stamp counter: some 20 us
constexpr int kAloneMin = 8, kAloneMax = 512;  // calls

// A team's shared state, each value on a cache line of its own.
struct Meeting {
  alignas(64) std::atomic<int64_t> next{0};
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<int> round{0};
  alignas(64) std::atomic<int> sleepers{0};
};

class Team {
 public:
  Team(Meeting& meeting, int size) : meeting_(meeting), size_(size) {}

  // Calls work(i) once for every i below count, for at least `grain` in a row by the same thread. Returns when all is done.
  template <typename F>
  void share(int64_t count, int64_t grain, F&& work) {
    if (size_ == 1) {
      for (int64_t i = 0; i < count; ++i) work(i);
      return;
    }
    grain = std::max(grain, count / (8 * size_));
    for (int64_t i; (i = meeting_.next.fetch_add(grain, std::memory_order_relaxed)) < count;)
      for (const int64_t stop = std::min(i + grain, count); i < stop; ++i) work(i);
    const uint64_t start = __rdtsc();
    meet(start);
    waited_cycles_ += __rdtsc() - start;
  }

  uint64_t waited_cycles() const { return waited_cycles_; }

 private:
  Meeting& meeting_;
  const int size_;
  uint64_t waited_cycles_ = 0;

  void meet(uint64_t start) {
    const int round = meeting_.round.load();
    if (meeting_.arrived.fetch_add(1) + 1 == size_) {
      meeting_.next.store(0);
      meeting_.arrived.store(0);
      meeting_.round.store(round + 1);
      if (meeting_.sleepers.load()) syscall(SYS_futex, &meeting_.round, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
      return;
    }
    while (__rdtsc() - start < kSpinCycles) {
      if (meeting_.round.load() != round) return;
      _mm_pause();
    }
    meeting_.sleepers.fetch_add(1);
    while (meeting_.round.load() == round) syscall(SYS_futex, &meeting_.round, FUTEX_WAIT_PRIVATE, round, nullptr, nullptr, 0);
    meeting_.sleepers.fetch_sub(1);
  }
};

// How many calls a thread makes alone after a team of its kept it waiting for more than half of the time, and so was slower.
struct Solitude {
  int calls = 0, next = kAloneMin;

  void learn(uint64_t waited, uint64_t all) {
    const bool is_slow = 2 * waited > all;
    calls = is_slow ? next : 0;
    next = is_slow ? std::min(2 * next, kAloneMax) : kAloneMin;
  }
};

// Every thread of a team calls work(team).
template <typename F>
void together(int threads, F&& work) {
  static thread_local Solitude solitude;
  Meeting meeting;
  if (threads > 1 && solitude.calls > 0) --solitude.calls, threads = 1;
  if (threads == 1) {
    Team alone(meeting, 1);
    return work(alone);
  }
  const uint64_t start = __rdtsc();
  uint64_t waited = 0;
#pragma omp parallel num_threads(threads)
  {
    Team team(meeting, omp_get_num_threads());
    work(team);
    if (omp_get_thread_num() == 0) waited = team.waited_cycles();
  }
  solitude.learn(waited, __rdtsc() - start);
}

inline int threads_if(bool is_worth_waking_them) { return is_worth_waking_them ? omp_get_max_threads() : 1; }

}  // namespace sameway
