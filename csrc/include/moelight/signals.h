// Threads that signals pass by. Does not depend on any thread.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace moelight {

// While it lives, threads are born without signals: those are for the threads of the program, which know what to do.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace moelight
