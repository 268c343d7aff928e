// Kernels that the checks of the fat binary have to complain of: fatbin_test.py says how. Compiled
// with -fmad=true -ftz=true.
struct alignas(16) Four {
  float x, y, z, w;
};

__device__ __forceinline__ float* global(unsigned long long address) {
  return static_cast<float*>(__cvta_global_to_generic(address));
}

extern "C" {

__global__ void frugal_fused(unsigned long long p) {
  float* at = global(p);
  at[3] = at[0] * at[1] + at[2];
}

__global__ void frugal_unrounded(unsigned long long p) {
  float* at = global(p);
  at[2] = at[0] - at[1];
}

__global__ void frugal_rounded(unsigned long long p) {
  float* at = global(p);
  const unsigned long long product = static_cast<unsigned long long>(threadIdx.x) * blockIdx.x;
  at[6] = __fadd_rn(at[0], at[1]);
  at[7] = __fsub_rn(__fmul_rn(at[2], at[3]), __fdiv_rn(at[4], static_cast<float>(product)));
  at[8] = __fsqrt_rn(at[5]);
}

__global__ void frugal_flushed(unsigned long long p) {
  float* at = global(p);
  at[2] = at[0] + at[1];
}

__global__ void frugal_approximate(unsigned long long p) {
  float* at = global(p);
  at[2] = __fdividef(at[0], at[1]);
}

__global__ void frugal_read_only(unsigned long long p) {
  float* at = global(p);
  at[1] = __ldg(at);
}

__global__ void frugal_system(unsigned long long p) {
  atomicAdd_system(reinterpret_cast<unsigned*>(global(p)), 1u);
}

__global__ void frugal_generic(unsigned long long p) {
  __shared__ float block[2];
  float* at = threadIdx.x % 2 == 0 ? block : global(p);
  at[1] = at[0];
}

__global__ void frugal_stack(unsigned long long p) {
  float* at = global(p);
  float copy[200];
  for (int i = 0; i < 200; ++i) copy[(i * static_cast<int>(at[201])) % 200] = at[i];
  at[200] = copy[static_cast<int>(at[202]) % 200];
}

__global__ void frugal_scalar(unsigned long long p) {
  float* at = global(p);
  for (int i = 0; i < 4; ++i) at[4 + i] = at[i];
}

__global__ void frugal_half_vector(unsigned long long p) {
  float* at = global(p);
  const Four four = *reinterpret_cast<const Four*>(at);
  at[4] = four.x, at[6] = four.y, at[8] = four.z, at[10] = four.w;
}

__global__ void frugal_good(unsigned long long p) {
  Four* at = reinterpret_cast<Four*>(global(p));
  at[1] = at[0];
}

__global__ void frugal_unlisted(unsigned long long p) { *global(p) = 1; }

}  // extern "C"
