// Run-time dispatch of the CPU kernels.
//
// What: picks the widest instruction set that this build has and this machine can run.
// Invariants: the choice changes speed only, never a bit of a result.
// Callers: the engine (kernels()), tests (kernels_isa()).
#include "device/kernels.h"

#include <string.h>

#include <atomic>

#include "device/cpu/tables.h"

namespace frugal::device {
namespace {

bool machine_has_avx2() {
#if defined(__x86_64__) || defined(__i386__)
  return __builtin_cpu_supports("avx2");
#else
  return false;
#endif
}

bool machine_has_avx512() {
#if defined(__x86_64__) || defined(__i386__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

const Kernels* choose() {
  if (const Kernels* k = kernels_isa("avx512")) return k;
  if (const Kernels* k = kernels_isa("avx2")) return k;
  return baseline_kernels();
}

}  // namespace

const Kernels& kernels() {
  // Each thread that comes early chooses the same.
  static constinit std::atomic<const Kernels*> chosen{nullptr};
  const Kernels* k = chosen.load(std::memory_order_relaxed);
  if (!k) chosen.store(k = choose(), std::memory_order_relaxed);
  return *k;
}

const Kernels* kernels_isa(const char* name) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();  // may run before this library's constructors
#endif
  if (strcmp(name, "baseline") == 0) return baseline_kernels();
  if (strcmp(name, "avx2") == 0) return machine_has_avx2() ? avx2_kernels() : nullptr;
  if (strcmp(name, "avx512") == 0) return machine_has_avx512() ? avx512_kernels() : nullptr;
  return nullptr;
}

}  // namespace frugal::device
