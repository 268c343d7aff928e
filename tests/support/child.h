// A child of a test's process.
#pragma once
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

// fork(): the child ends with the thread that has called this, at the latest.
inline pid_t fork_child() {
  const pid_t parent = getpid(), pid = fork();
  if (pid != 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  return 0;
}
