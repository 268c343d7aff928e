// The language of kernel bodies: threads of a block, and memory that kernels see.
//
// What: the one header with target-dependent code, except arithmetic's, arith/hd.h. Compiled by
// nvcc it is CUDA's built-ins. Compiled for the host it is calls into tests/sim, which runs a
// block's threads as fibers and checks every access (docs/cuda.md, "simt.h").
//
// Invariants: bodies call load and store for all memory but their own variables and shared(). No
// load goes through the read-only cache (host rows change between kernels). add() is for device
// memory alone: nothing on the device reads, modifies and writes host memory. A warp is 32 threads,
// all of which take part in shuffle and ballot. These two order no memory. Threads of a block are a
// multiple of 32.
//
// Callers: ops/*.h.
#ifndef FRUGAL_DEVICE_SIMT_H_
#define FRUGAL_DEVICE_SIMT_H_

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "device/runtime.h"

#if defined(__CUDACC__)
#define FRUGAL_DEVICE __device__ __forceinline__
#else
#define FRUGAL_DEVICE inline
#endif

namespace frugal::device {

struct alignas(16) Float4 {
  float x, y, z, w;
};

inline constexpr uint32_t kWarp = 32;

#if defined(__CUDACC__)

FRUGAL_DEVICE uint32_t thread() { return threadIdx.x; }
FRUGAL_DEVICE uint32_t threads() { return blockDim.x; }
FRUGAL_DEVICE uint32_t block() { return blockIdx.x; }
FRUGAL_DEVICE uint32_t blocks() { return gridDim.x; }
FRUGAL_DEVICE uint32_t lane() { return threadIdx.x % kWarp; }
FRUGAL_DEVICE void sync() { __syncthreads(); }
FRUGAL_DEVICE uint32_t ballot(bool p) { return __ballot_sync(0xffffffffu, p); }

// `v` of lane `from` of the caller's group of `width` lanes (a power of two).
template <class T>
FRUGAL_DEVICE T shuffle(T v, uint32_t from, uint32_t width = kWarp) {
  return __shfl_sync(0xffffffffu, v, static_cast<int>(from), static_cast<int>(width));
}
template <class T>
FRUGAL_DEVICE T shuffle_xor(T v, uint32_t mask) {
  return __shfl_xor_sync(0xffffffffu, v, static_cast<int>(mask));
}

FRUGAL_DEVICE char* shared() {
  extern __shared__ __align__(16) char frugal_shared[];
  return frugal_shared;
}

// In PTX, since the compiler takes an address that was a number for a generic one. (With
// __cvta_global_to_generic instead, nvcc 13.0 does not end on reduce_runs.) Volatile: the compiler
// keeps accesses in the order of the body. So accesses that should be in flight together must be
// next to each other there.
template <class T>
FRUGAL_DEVICE T load(Ptr<T> p) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  T v;
  if constexpr (sizeof(T) == 4) {
    uint32_t x;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(p.address));
    memcpy(&v, &x, sizeof v);
  } else if constexpr (sizeof(T) == 8) {
    uint64_t x;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(x) : "l"(p.address));
    memcpy(&v, &x, sizeof v);
  } else {
    float x[4];
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "l"(p.address));
    memcpy(&v, x, sizeof v);
  }
  return v;
}
template <class T>
FRUGAL_DEVICE void store(Ptr<T> p, T v) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  if constexpr (sizeof(T) == 4) {
    uint32_t x;
    memcpy(&x, &v, sizeof v);
    asm volatile("st.global.u32 [%0], %1;" ::"l"(p.address), "r"(x));
  } else if constexpr (sizeof(T) == 8) {
    uint64_t x;
    memcpy(&x, &v, sizeof v);
    asm volatile("st.global.u64 [%0], %1;" ::"l"(p.address), "l"(x));
  } else {
    float x[4];
    memcpy(x, &v, sizeof v);
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p.address), "f"(x[0]), "f"(x[1]),
                 "f"(x[2]), "f"(x[3]));
  }
}
// Sets a word to 1, which several threads may do at once: a flag, in host memory too.
FRUGAL_DEVICE void raise(Ptr<uint32_t> p) { store(p, 1u); }
FRUGAL_DEVICE uint32_t add(Ptr<uint32_t> p, uint32_t v) {
  return atomicAdd(reinterpret_cast<unsigned int*>(p.address), v);
}

#else

namespace sim {  // tests/sim/block.cpp
struct Position {
  uint32_t thread, threads, block, blocks;
};
const Position& position();  // of the running fiber
void meet_block();
uint32_t meet_ballot(bool p);
uint64_t meet_exchange(uint64_t v, uint32_t from);  // lane `from` of the warp
char* block_memory();
const void* readable(uint64_t address, size_t bytes);
void* writable(uint64_t address, size_t bytes);
uint32_t add_device(uint64_t address, uint32_t v);
}  // namespace sim

FRUGAL_DEVICE uint32_t thread() { return sim::position().thread; }
FRUGAL_DEVICE uint32_t threads() { return sim::position().threads; }
FRUGAL_DEVICE uint32_t block() { return sim::position().block; }
FRUGAL_DEVICE uint32_t blocks() { return sim::position().blocks; }
FRUGAL_DEVICE uint32_t lane() { return sim::position().thread % kWarp; }
FRUGAL_DEVICE void sync() { sim::meet_block(); }
FRUGAL_DEVICE uint32_t ballot(bool p) { return sim::meet_ballot(p); }

template <class T>
FRUGAL_DEVICE T shuffle(T v, uint32_t from, uint32_t width = kWarp) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  memcpy(&bits, &v, sizeof(T));
  bits = sim::meet_exchange(bits, lane() / width * width + from % width);
  memcpy(&v, &bits, sizeof(T));
  return v;
}
template <class T>
FRUGAL_DEVICE T shuffle_xor(T v, uint32_t mask) {
  return shuffle(v, lane() ^ mask);
}

FRUGAL_DEVICE char* shared() { return sim::block_memory(); }

template <class T>
FRUGAL_DEVICE T load(Ptr<T> p) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  T v;
  memcpy(&v, sim::readable(p.address, sizeof(T)), sizeof(T));
  return v;
}
template <class T>
FRUGAL_DEVICE void store(Ptr<T> p, T v) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  memcpy(sim::writable(p.address, sizeof(T)), &v, sizeof(T));
}
FRUGAL_DEVICE void raise(Ptr<uint32_t> p) {
  auto* word = static_cast<uint32_t*>(sim::writable(p.address, sizeof(uint32_t)));
  __atomic_store_n(word, 1u, __ATOMIC_RELAXED);
}
FRUGAL_DEVICE uint32_t add(Ptr<uint32_t> p, uint32_t v) { return sim::add_device(p.address, v); }

#endif

template <class T, class U>
FRUGAL_DEVICE Ptr<T> as(Ptr<U> p) {
  return {p.address};
}

}  // namespace frugal::device

#endif  // FRUGAL_DEVICE_SIMT_H_
