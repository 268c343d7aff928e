// `check` preloads it: the machine seems to have at least 4 processors. Julia 1.5 starts no more
// threads than there are processors, and the tests need 4 threads on small machines, too.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>

long sysconf(int name) {
  static long (*real)(int);
  if (!real) real = (long (*)(int))dlsym(RTLD_NEXT, "sysconf");
  const long answer = real(name);
  return name == _SC_NPROCESSORS_ONLN && answer < 4 ? 4 : answer;
}
