#include "oracle/processes.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <sstream>
#include <utility>

#include "oracle/meeting.h"
#include "oracle/random.h"
#include "oracle/replay.h"
#include "reference/reference.h"
#include "support/child.h"

extern char** environ;

namespace frugal_oracle {
namespace {

constexpr int kMeeting = 9;  // the leader's descriptor of the meeting

// Runs a program whose descriptor `there` is our `here`. Returns its process, or -1.
pid_t Spawn(const std::string& program, std::vector<std::string> arguments, int here, int there) {
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_adddup2(&files, here, there);
  pid_t process = -1;
  if (posix_spawn(&process, program.c_str(), &files, nullptr, argv.data(), environ) != 0)
    process = -1;
  posix_spawn_file_actions_destroy(&files);
  return process;
}

std::string HowItEnded(int status) {
  if (WIFSIGNALED(status)) return "was ended by signal " + std::to_string(WTERMSIG(status));
  return "ended with status " + std::to_string(WEXITSTATUS(status));
}

int WaitFor(pid_t process) {
  int status = 0;
  while (waitpid(process, &status, 0) < 0 && errno == EINTR) {
  }
  return status;
}

// frugal-controller, from its first reply on.
class Controller {
 public:
  // Returns what is wrong, or "".
  std::string Start(const std::string& program, const std::string& address) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return "no pipe";
    process_ = Spawn(program, {program, address}, ends[1], STDOUT_FILENO);
    close(ends[1]);
    char c = 0;
    while (process_ > 0 && c != '\n' && read(ends[0], &c, 1) == 1) {
    }
    close(ends[0]);
    return c == '\n' ? "" : program + " does not serve";
  }
  void Kill() {
    kill(process_, SIGKILL);
    WaitFor(std::exchange(process_, -1));
  }
  std::string Stop() {
    if (process_ <= 0) return "";
    kill(process_, SIGTERM);
    const int status = WaitFor(std::exchange(process_, -1));
    return status == 0 ? "" : "frugal-controller " + HowItEnded(status);
  }

 private:
  pid_t process_ = -1;
};

class Leader {
 public:
  Leader(const Script& script, const frugal_reference::Reference& reference, const Layout& layout,
         Meeting* meeting)
      : script_(script), reference_(reference), layout_(layout), meeting_(*meeting) {}

  int Run(const std::string& controller, int hang_seconds) {
    const char* temporary = std::getenv("TMPDIR");
    std::string folder =
        std::string(temporary != nullptr ? temporary : "/tmp") + "/frugal-oracle-XXXXXX";
    if (mkdtemp(folder.data()) == nullptr) {
      meeting_.Fail("no folder " + folder);
      return 1;
    }
    const std::string address = folder + "/s";
    Controller program;
    if (layout_.program) {
      const std::string wrong = program.Start(controller, address);
      if (!wrong.empty()) meeting_.Fail(wrong);
      meeting_.serving = 1;
    }
    std::fflush(stdout);
    for (uint32_t p = 0; p < layout_.processes && !meeting_.failed(); ++p) Fork(address, p);
    Wait(hang_seconds, &program);
    const std::string wrong = program.Stop();
    if (!wrong.empty()) meeting_.Fail(wrong);
    unlink(address.c_str());
    unlink((address + ".lock").c_str());
    rmdir(folder.c_str());
    return meeting_.failed() ? 1 : 0;
  }

 private:
  void Fork(const std::string& address, uint32_t number) {
    const pid_t process = fork_child();
    if (process < 0) meeting_.Fail("no process");
    if (process > 0) processes_.push_back(process);
    if (process != 0) return;
    const size_t pages = 1 + Random(script_.seed * 331 + number).Below(1 << 18);
    mmap(nullptr, pages * 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    Party party;
    party.address = address;
    party.host = !layout_.program && number == 0;
    party.process = number;
    party.processes = layout_.processes;
    party.process_of_rank = layout_.process_of_rank;
    RunParty(script_, reference_, party, &meeting_);
    std::exit(0);  // and sanitizers have their say
  }

  void Wait(int hang_seconds, Controller* program) {
    Stillness stillness;
    uint64_t failed_for = 0;  // ticks, of a millisecond or more
    size_t left = processes_.size();
    bool killed = false;
    while (left > 0) {
      for (size_t p = 0; p < processes_.size(); ++p) {
        int status = 0;
        if (processes_[p] <= 0 || waitpid(processes_[p], &status, WNOHANG) <= 0) continue;
        processes_[p] = -1;
        --left;
        if (status != 0 && !killed) {
          meeting_.Fail("process " + std::to_string(p) + ' ' + HowItEnded(status));
        }
      }
      if (left == 0) break;
      if (meeting_.waiting_for_death == layout_.processes && !meeting_.controller_dead) {
        program->Kill();
        meeting_.controller_dead = true;
      }
      const uint64_t still = stillness.Tick(meeting_.progress);
      if (!meeting_.failed() && still > static_cast<uint64_t>(hang_seconds) * 1000) {
        meeting_.Fail(WhereItHangs(hang_seconds));
      }
      // They end by themselves, or what failed is that they do not.
      if (meeting_.failed() && ++failed_for > 40'000 && !killed) {
        killed = true;
        for (pid_t process : processes_) {
          if (process > 0) kill(process, SIGKILL);
        }
      }
      usleep(1000);
    }
  }

  std::string WhereItHangs(int hang_seconds) const {
    std::ostringstream out;
    out << "HANGS (" << meeting_.progress.phase.load() << "): nothing moves for " << hang_seconds
        << " s";
    for (size_t r = 0; r < script_.ranks.size(); ++r) {
      const Progress::Rank& rank = meeting_.progress.ranks[r];
      const char* const doing = rank.doing;
      out << "\n  rank " << r << ": step " << rank.step << ", " << (doing == nullptr ? "-" : doing);
    }
    return out.str();
  }

  const Script& script_;
  const frugal_reference::Reference& reference_;
  const Layout& layout_;
  Meeting& meeting_;
  std::vector<pid_t> processes_;  // -1: has ended
};

Meeting* MapMeeting(int descriptor) {
  void* const memory =
      mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<Meeting*>(memory);
}

}  // namespace

std::string Layout::Describe() const {
  std::ostringstream out;
  out << processes << " processes of " << (program ? "frugal-controller" : "process 0")
      << ", ranks in";
  for (uint32_t process : process_of_rank) out << ' ' << process;
  return out.str();
}

// Drawn from another sequence than the script, which is that of the threads.
Layout MakeLayout(const Script& script) {
  Random random(script.seed * 173);
  Layout layout;
  const uint32_t ranks = static_cast<uint32_t>(script.ranks.size());
  // Stores are in this program.
  layout.program = (random.Chance(0.5) || script.killed) && !script.far();
  layout.processes = ranks;
  const bool own = random.Chance(0.65);
  if (!own) layout.processes = static_cast<uint32_t>(random.Between(1, ranks));
  for (uint32_t r = 0; r < ranks; ++r) {
    layout.process_of_rank.push_back(own ? r
                                         : static_cast<uint32_t>(random.Below(layout.processes)));
  }
  if (random.Chance(
          0.2)) {  // one without a rank: the first, which may have the engine, or the last
    ++layout.processes;
    const uint32_t by = random.Chance(0.5) ? 1 : 0;
    for (uint32_t& process : layout.process_of_rank) process += by;
  }
  return layout;
}

std::string ForProcesses(Script* script) {
  if (!std::exchange(script->one_thread, false)) return "";
  return "one thread for all ranks";
}

int Lead(uint64_t seed, const Options& options, const std::string& controller, int hang_seconds,
         int descriptor) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  Meeting* const meeting = MapMeeting(descriptor);
  close(descriptor);
  if (meeting == nullptr) return 1;
  Script script = MakeScript(seed, options);
  const Layout layout = MakeLayout(script);
  ForProcesses(&script);
  frugal_reference::Reference reference(script.config.seed, script.config.world_size);
  meeting->recording = options.record;
  if (options.record) {
    AddTables(script, &reference);
  } else {
    Replay(&script, &reference);
  }
  return Leader(script, reference, layout, meeting).Run(controller, hang_seconds);
}

Outcome RunLeader(const std::vector<std::string>& arguments) {
  Outcome outcome;
  const int descriptor = memfd_create("meeting", MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, sizeof(Meeting)) != 0) {
    outcome.message = "no shared memory";
    return outcome;
  }
  Meeting* const meeting = MapMeeting(descriptor);
  new (meeting) Meeting();
  std::vector<std::string> all = {"oracle", "--lead", std::to_string(kMeeting)};
  all.insert(all.end(), arguments.begin(), arguments.end());
  const pid_t leader = Spawn("/proc/self/exe", all, descriptor, kMeeting);
  close(descriptor);
  const int status = leader > 0 ? WaitFor(leader) : 1;
  if (status != 0) meeting->Fail("the run's leader " + HowItEnded(status));
  outcome = OutcomeOf(*meeting);
  meeting->~Meeting();
  munmap(meeting, sizeof(Meeting));
  return outcome;
}

}  // namespace frugal_oracle
