// Writes the names of all kernels, a line each: list_kernels FILE.
#include <cstdio>

#include "device/ops/kernels.h"

int main(int argc, char** argv) {
  FILE* file = argc == 2 ? fopen(argv[1], "w") : nullptr;
  if (file == nullptr) return 2;
#define X(name, Arguments) fprintf(file, #name "\n");
  FRUGAL_KERNELS(X)
#undef X
  return fclose(file) == 0 ? 0 : 1;
}
