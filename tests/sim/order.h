// What the host implementation reports to ThreadSanitizer about its own synchronization.
//
// What: a stream's thread, its queue and the registries share locks and counts with every thread
// that calls the Runtime. ThreadSanitizer would take each as an order of the program and miss races
// between streams that no event joins. So what this folder does for itself is unseen (Unseen,
// FRUGAL_UNSEEN), and the orders that CUDA gives are reported by name (release_order,
// acquire_order): a call to the stream that runs it, an operation to the next of its stream, a
// record to those that waited for the event. Without ThreadSanitizer all of it is nothing. The real
// synchronization is in atomics and locks, always.
#pragma once

#if defined(__SANITIZE_THREAD__)
#define FRUGAL_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define FRUGAL_TSAN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define FRUGAL_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FRUGAL_ASAN 1
#endif
#endif

#if defined(FRUGAL_TSAN)
extern "C" {
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
void AnnotateIgnoreSyncBegin(const char*, int);
void AnnotateIgnoreSyncEnd(const char*, int);
void __tsan_acquire(void*);
void __tsan_release(void*);
}
// For small functions on plain memory: nothing in them is seen.
#if defined(__clang__)
#define FRUGAL_UNSEEN __attribute__((disable_sanitizer_instrumentation, noinline))
#else
#define FRUGAL_UNSEEN __attribute__((no_sanitize_thread, noinline))
#endif
#else
#define FRUGAL_UNSEEN
#endif

namespace frugal::device::sim {

// Accesses and synchronization of the thread are unseen in this scope.
class Unseen {
 public:
  Unseen() {
#if defined(FRUGAL_TSAN)
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
#endif
  }
  ~Unseen() {
#if defined(FRUGAL_TSAN)
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
#endif
  }
  Unseen(const Unseen&) = delete;
  Unseen& operator=(const Unseen&) = delete;
};

// What the thread did so far is before what a thread does after acquire_order of the same address.
// Not in an Unseen scope, where they would be unseen, too.
inline void release_order([[maybe_unused]] const void* at) {
#if defined(FRUGAL_TSAN)
  __tsan_release(const_cast<void*>(at));
#endif
}
inline void acquire_order([[maybe_unused]] const void* at) {
#if defined(FRUGAL_TSAN)
  __tsan_acquire(const_cast<void*>(at));
#endif
}

}  // namespace frugal::device::sim
