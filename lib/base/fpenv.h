// FpEnvironment: the floating-point environment that the engine computes in.
//
// What: saves the calling thread's control register and sets the default (round to nearest even,
// denormals kept, exceptions masked). At the end of its scope it restores the register. Exception
// flags that the engine's arithmetic raises do not remain either.
//
// Invariants: the arithmetic of docs/arithmetic.md holds only inside such a scope. Restoring does
// not throw or fail.
// Callers: each call of the interface (capi/frugal.cpp), and each thread of the library
// (base/thread.h).
#ifndef FRUGAL_BASE_FPENV_H_
#define FRUGAL_BASE_FPENV_H_

#include <stdint.h>

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#include <fenv.h>
#endif

namespace frugal {

class FpEnvironment {
 public:
#if defined(__x86_64__) || defined(__i386__)
  FpEnvironment() : saved_(_mm_getcsr()) {
    // The write is the slow part and almost never needed; flags (the low six bits) may differ.
    if ((saved_ & ~0x3fu) != kDefault) _mm_setcsr(kDefault);
  }
  ~FpEnvironment() {
    if (_mm_getcsr() != saved_) _mm_setcsr(saved_);
  }

 private:
  static constexpr uint32_t kDefault = 0x1f80;  // all exceptions masked, nearest, no FTZ, no DAZ
  uint32_t saved_;
#elif defined(__aarch64__)
  FpEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("mrs %0, fpsr" : "=r"(saved_status_));
    if (saved_ != 0) asm volatile("msr fpcr, %0" : : "r"(static_cast<uint64_t>(0)) : "memory");
  }
  ~FpEnvironment() {
    if (saved_ != 0) asm volatile("msr fpcr, %0" : : "r"(saved_) : "memory");
    asm volatile("msr fpsr, %0" : : "r"(saved_status_) : "memory");
  }

 private:
  uint64_t saved_;
  uint64_t saved_status_;
#else
  FpEnvironment() {
    fegetenv(&saved_);
    fesetenv(FE_DFL_ENV);
  }
  ~FpEnvironment() { fesetenv(&saved_); }

 private:
  fenv_t saved_;
#endif

 public:
  FpEnvironment(const FpEnvironment&) = delete;
  FpEnvironment& operator=(const FpEnvironment&) = delete;
};

}  // namespace frugal

#endif  // FRUGAL_BASE_FPENV_H_
