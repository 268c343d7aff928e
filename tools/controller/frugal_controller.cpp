// frugal-controller ADDRESS: owns the tables that trainer processes share (docs/processes.md).
//
// The first process that attaches decides the engine's configuration. SIGINT and SIGTERM end it.
#include <signal.h>
#include <sys/resource.h>

#include <cstdio>
#include <cstring>
#include <exception>

#include "frugal.h"
#include "process/server.h"

namespace {

void tell(void*, int32_t, const char* text) {
  std::fprintf(stderr, "frugal-controller: %s\n", text);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 || std::strcmp(argv[1], "--help") == 0 || std::strcmp(argv[1], "-h") == 0) {
    std::printf(
        "usage: frugal-controller ADDRESS\n"
        "Owns the tables of trainer processes, which attach with frugal_config.service = ADDRESS.\n"
        "ADDRESS is the path of a Unix-domain socket. The controller makes it, for processes of\n"
        "the same user. The first process that attaches decides the engine's configuration.\n"
        "SIGINT or SIGTERM ends the controller, and the tables with it.\n");
    return argc == 2 ? 0 : 2;
  }
  // Before any thread is started, so that all threads inherit the mask.
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGINT);
  sigaddset(&ends, SIGTERM);
  sigprocmask(SIG_BLOCK, &ends, nullptr);
  // Each attached process needs some descriptors, and so do messages with descriptors in flight.
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
    files.rlim_cur = files.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &files);
  }
  std::unique_ptr<frugal::Server> server;
  frugal::begin_call();
  frugal::Status s;
  try {
    s = frugal::Server::start(argv[1], nullptr, &server, tell);
  } catch (const std::exception&) {
    s = frugal::fail(FRUGAL_ERR_OUT_OF_MEMORY, "there is no memory for a controller");
  }
  if (frugal::end_call(s) != FRUGAL_OK) {
    frugal_error error;
    frugal::last_error(&error);
    std::fprintf(stderr, "frugal-controller: %s (%s)\n", error.message, frugal_status_name(s));
    return 1;
  }
  std::printf("frugal-controller: serving %s\n", argv[1]);
  std::fflush(stdout);
  int got = 0;
  sigwait(&ends, &got);
  server->stop();
  return 0;
}
