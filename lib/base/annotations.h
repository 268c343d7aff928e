// Marks for clang's check of locks (-Wthread-safety; tests/annotations.sh). Other compilers ignore
// them.
//
// A member marked GUARDED_BY(mu) is accessed only while mu is held. A function marked REQUIRES(mu)
// is called with mu held, one marked EXCLUDES(mu) without it. A lambda has the mark after its
// parameters: [&]() REQUIRES(mu) { ... }.
#pragma once
#ifdef __clang__
#define FRUGAL_ATTRIBUTE(x) __attribute__((x))
#else
#define FRUGAL_ATTRIBUTE(x)
#endif

#define CAPABILITY(name) FRUGAL_ATTRIBUTE(capability(name))
#define SCOPED_CAPABILITY FRUGAL_ATTRIBUTE(scoped_lockable)
#define GUARDED_BY(mu) FRUGAL_ATTRIBUTE(guarded_by(mu))
#define PT_GUARDED_BY(mu) FRUGAL_ATTRIBUTE(pt_guarded_by(mu))
#define ACQUIRED_BEFORE(...) FRUGAL_ATTRIBUTE(acquired_before(__VA_ARGS__))
#define ACQUIRED_AFTER(...) FRUGAL_ATTRIBUTE(acquired_after(__VA_ARGS__))
#define REQUIRES(...) FRUGAL_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) FRUGAL_ATTRIBUTE(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) FRUGAL_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define RELEASE(...) FRUGAL_ATTRIBUTE(release_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) FRUGAL_ATTRIBUTE(try_acquire_capability(__VA_ARGS__))
#define ASSERT_CAPABILITY(mu) FRUGAL_ATTRIBUTE(assert_capability(mu))
#define RETURN_CAPABILITY(mu) FRUGAL_ATTRIBUTE(lock_returned(mu))
#define NO_THREAD_SAFETY_ANALYSIS FRUGAL_ATTRIBUTE(no_thread_safety_analysis)
