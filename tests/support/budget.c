/* Runs a test and reports how much processor time it and the processes that it started have used.
 *
 *     budget SECONDS COMMAND...
 *
 * Processor time, since a test's label is to be true on a busy machine, too. The run's report names
 * the tests that are beyond SECONDS. They do not fail for it: how fast a processor is says nothing
 * of the library. Exit status: that of the command. Processes that outlive the command are waited
 * for, so that their time counts. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static double seconds(struct timeval t) { return (double)t.tv_sec + (double)t.tv_usec * 1e-6; }

int main(int argc, char** argv) {
  if (argc < 3) {
    fprintf(stderr, "usage: budget SECONDS COMMAND...\n");
    return 2;
  }
  const double most = atof(argv[1]);
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  const pid_t command = fork();
  if (command < 0) {
    perror("budget: fork");
    return 1;
  }
  if (command == 0) {
    prctl(PR_SET_PDEATHSIG,
          SIGKILL); /* ctest kills this program alone when the test's time is up */
    execvp(argv[2], argv + 2);
    perror(argv[2]);
    _exit(127);
  }
  int result = 1, status = 0;
  pid_t ended;
  while ((ended = wait(&status)) > 0) {
    if (ended == command) result = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  struct rusage used;
  getrusage(RUSAGE_CHILDREN, &used);
  const double taken = seconds(used.ru_utime) + seconds(used.ru_stime);
  printf("budget: %.1f s of processor time, of %.0f%s\n", taken, most,
         taken <= most ? "" : ": too long for its label (docs/testing.md)");
  return result;
}
