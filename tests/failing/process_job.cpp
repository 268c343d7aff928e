// Small jobs of several processes, made to meet failures (tests/failing/failing.h). All rows that
// are looked up, by step, and the final tables make up the digest.
//
//   process_job CONTROLLER [OPTIONS]   starts the program CONTROLLER, attaches to it, and has both
//   ranks process_job --serve [OPTIONS]      serves its own engine and has rank 0; a process of its
//   own, "peer_job", has rank 1 OPTIONS: --at-once, --threads N, --staleness N, --gpu (the device
//   sim:0), --kill (with --serve: the other process is killed in the middle of a step, and another
//   has its rank from then on)
//
// What has lost its connection attaches again; what was undone is done again.
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "failing.h"
#include "frugal.h"
#include "job.h"

namespace {

constexpr uint64_t kSteps = 8, kAborted = 4, kKilled = 5;
constexpr int kMost = 8;

struct Options {
  int32_t mode = FRUGAL_FLUSH_DEFERRED;
  uint32_t threads = 1;
  uint64_t staleness = 0;
  const char* device = nullptr;
  bool kills = false;
};

struct Lost {};    // the connection
struct Undone {};  // the step

uint64_t g_told = 0;
void look_after_other();
bool g_peer = false;   // in this process nothing fails by itself
std::string g_folder;  // of the service

[[noreturn]] void end(int status, const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
  if (g_peer && status != 0) std::fprintf(stderr, "peer: %s\n", line.c_str());
  for (const char* name : {"/service", "/service.lock"}) unlink((g_folder + name).c_str());
  rmdir(g_folder.c_str());
  _exit(status);
}

// Counts reported failures. Too many of them end the injected failures, and then the job.
void told(const std::string& why) {
  ++g_told;
  if (g_peer) return;
  if (!failing::fired()) end(1, "wrong without a failure: " + why);
  if (g_told == 6) failing::over();
  if (g_told == 40) end(1, "wrong: never succeeds: " + why);
}

void again(const char* call, const std::function<int32_t()>& make,
           std::initializer_list<int32_t> named) {
  for (int tries = 1;; ++tries) {
    int32_t status;
    {
      failing::Call inside;
      status = make();
    }
    if (status == FRUGAL_OK) return;
    const std::string why = said(call, status);
    if (status == FRUGAL_ERR_STEP_ABORTED) throw Undone{};
    if (status == FRUGAL_ERR_TIMEOUT && !g_peer && !failing::fired()) {
      // On a busy machine the other process is late; whether it comes at all is the watchdog's to
      // say.
      look_after_other();
      --tries;
      continue;
    }
    // There, too, it may say nothing for the whole time-out, and lose its rank.
    static int late = 0;
    if (status == FRUGAL_ERR_PEER_LOST && !g_peer && !failing::fired() && ++late <= 3) {
      look_after_other();
      throw Lost{};
    }
    told(why);
    look_after_other();
    // A controller that can accept no connection cannot report that. One wait for a whole time-out
    // is enough.
    if (!g_peer && why.find("has not replied") != std::string::npos) failing::over();
    if (status == FRUGAL_ERR_PEER_LOST) throw Lost{};
    if (status == FRUGAL_ERR_UNHEALTHY && g_peer) end(3, "unhealthy " + why);
    // (To ask an engine in another process for its health may fail like any other call.)
    if (g_engine && !g_peer && (status == FRUGAL_ERR_UNHEALTHY || tries > 1)) {
      failing::over();
      const int32_t health = frugal_health(g_engine);
      if (health == FRUGAL_ERR_PEER_LOST) throw Lost{};
      if (health != FRUGAL_OK) {
        const int32_t closed = frugal_close(g_engine);
        if (closed != FRUGAL_OK) end(1, "wrong: " + said("close of an unhealthy engine", closed));
        end(3, "unhealthy " + why);
      }
    }
    bool known = status == FRUGAL_ERR_OUT_OF_MEMORY || status == FRUGAL_ERR_TIMEOUT ||
                 status == FRUGAL_ERR_UNSUPPORTED;
    for (int32_t n : named) known |= status == n;
    if (!known) end(1, "wrong status of " + why);
    if (why.size() < 20) end(1, "wrong: no message of " + why);
    if (status == FRUGAL_ERR_TIMEOUT) failing::over();
    if (g_peer)
      usleep(100000);  // until nothing fails any more in the other process
    else if (tries == kMost)
      end(1, "wrong: never succeeds: " + why);
  }
}

// A program that the job has started, and the first line that it has said.
class Program {
 public:
  Program(const char* path, std::vector<std::string> arguments) {
    int out[2];
    if (pipe(out) != 0) end(1, "wrong: no pipe");
    const pid_t parent = getpid();
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(9);
      dup2(out[1], 1);
      close(out[0]);
      close(out[1]);
      std::vector<char*> argv;
      for (std::string& a : arguments) argv.push_back(a.data());
      argv.push_back(nullptr);
      execv(path, argv.data());
      _exit(9);
    }
    close(out[1]);
    from_ = out[0];
  }
  // What it has said; false: nothing within that time.
  bool says(std::string* line, int ms) {
    pollfd ready{from_, POLLIN, 0};
    if (poll(&ready, 1, ms) != 1) return false;
    line->clear();
    for (char c; read(from_, &c, 1) == 1 && c != '\n';) line->push_back(c);
    return true;
  }
  // Its exit status; -1: it runs. It must not end by a signal that this job has not sent.
  int ended(bool wait = false) {
    int status = 0;
    if (waitpid(pid_, &status, wait ? 0 : WNOHANG) != pid_) return -1;
    if (!WIFEXITED(status))
      end(1, std::string("wrong: a process was ended by ") + strsignal(WTERMSIG(status)));
    return WEXITSTATUS(status);
  }
  void stop() { kill(pid_, SIGTERM); }
  void end_now() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

 private:
  pid_t pid_ = -1;
  int from_ = -1;
};

Program* g_other = nullptr;
std::string g_said;  // its last words

// The other process lives as long as this one wants it to, unless the engine is unhealthy.
[[noreturn]] void other_has_ended(const std::string& line) {
  failing::over();
  if (line.compare(0, 9, "unhealthy") == 0) end(frugal_close(g_engine) == FRUGAL_OK ? 3 : 1, line);
  end(1, "wrong: the other process has ended: " + line);
}
void look_after_other() {
  if (!g_other || g_other->ended() < 0) return;
  (void)g_other->says(&g_said, -1);
  if (g_said.compare(0, 3, "ok ") != 0) other_has_ended(g_said);
  g_other = nullptr;
}

struct Job : JobBase {
  Options options;
  std::string address;
  const char* controller = nullptr;  // null: it serves, or is the peer
  std::vector<std::string> peer;     // its arguments
  std::vector<uint32_t> ranks;
  std::map<uint64_t, Digest> seen;  // by step and rank
  bool wrote = false, aborted = false;

  void declare(uint64_t step) {
    for (uint32_t r : ranks) JobBase::declare(step, r);
  }
  void use(uint64_t step) {
    for (uint32_t r : ranks) {
      Op a(dense, keys_of(step, r, kDense, 120), 0.5f),
          b(hashed, keys_of(step + 1, r, kHashed, 120), 0.25f),
          hot(dense, keys_of(0, 0, 3, 120), 0.125f),
          bags(hashed, keys_of(step, r, kHashed, 60), -0.5f, 12);
      frugal_op ops[] = {a.op, b.op, bags.op};
      AGAIN(frugal_lookup(trainers[r], ops, 3));
      Digest of_step;
      for (const Op* o : {&a, &b, &bags})
        of_step.add(o->rows.data(), o->rows.size() * sizeof(float));
      seen[step * kRanks + r] = of_step;
      AGAIN(frugal_push_grad(trainers[r], ops, 2));
      if (step % 2 == 0) AGAIN(frugal_push_grad(trainers[r], &hot.op, 1));
      if (step % 3 == 0) AGAIN(frugal_push_grad(trainers[r], &bags.op, 1));
    }
  }
  void train(uint64_t step) {
    for (uint32_t r : ranks) {
      // Each rank's next call reports an undone step, once.
      const auto begin = [&] {
        AGAIN(frugal_step_begin(trainers[r], step, FRUGAL_TIMEOUT_DEFAULT));
      };
      try {
        begin();
      } catch (Undone) {
        if (next_step() != step) throw;
        begin();
      }
    }
    use(step);
    if (step == kKilled && std::exchange(options.kills, false)) {
      g_other->end_now();
      g_other = new Program("/proc/self/exe", peer);
      for (;; usleep(1000)) use(step);  // until its loss is reported
    }
    if (step == kAborted && ranks[0] == 0 && !aborted) {
      AGAIN(frugal_step_abort(trainers[0]));
      aborted = true;
      throw Undone{};
    }
    for (uint32_t r : ranks) AGAIN(frugal_step_end(trainers[r], step, 0));
  }
  // Between two steps, of a process that has all ranks; may be done twice.
  void outside() {
    Op some(hashed, keys_of(5, 0, kHashed + 50, 70), 0.75f);
    AGAIN(frugal_put(hashed, some.keys.data(), some.keys.size(), 0, some.grads.data(), 0));
    AGAIN(frugal_delete(hashed, some.keys.data(), 20, nullptr));
    AGAIN(frugal_delete(dense, some.keys.data(), 5, nullptr));
    Op read(dense, keys_of(9, 1, kDense, 50), 0);
    AGAIN(frugal_read(g_engine, nullptr, &read.op, 1, FRUGAL_TIMEOUT_DEFAULT));
    frugal_optimizer slower = FRUGAL_OPTIMIZER_INIT;
    slower.kind = FRUGAL_ADAGRAD;
    slower.lr = 0.001f;
    AGAIN(frugal_table_set_optimizer(dense, 5, &slower));
    frugal_table* more = table("other", FRUGAL_HASHED, 500, FRUGAL_ADAGRAD);
    AGAIN(frugal_put(more, some.keys.data(), some.keys.size(), 0, some.grads.data(), 0));
    uint64_t cursor = 0, keys[100];
    size_t n = 0;
    AGAIN(frugal_table_keys(more, &cursor, keys, 100, &n));
    AGAIN(frugal_table_drop(more));
    frugal_table* found = nullptr;
    AGAIN(frugal_table_find(g_engine, "dense", &found));
    char name[256];
    n = 1;
    for (uint64_t from = 0; n > 0;)
      AGAIN(frugal_table_next(g_engine, &from, name, sizeof name, &n));
    frugal_table_info info;
    info.struct_size = sizeof info;
    AGAIN(frugal_table_describe(found, &info));
    // A rank leaves and comes back.
    AGAIN(frugal_trainer_close(trainers[1]));
    join(1, 0, options.device);
    wrote = true;
  }
  void start_controller() {
    for (int tries = 0;; ++tries) {
      auto* started = new Program(controller, {controller, address});
      std::string line;
      (void)started->says(&line, -1);
      if (line.find("serving") != std::string::npos) {
        g_other = started;
        return;
      }
      if (started->ended(true) != 1) end(1, "wrong: the controller says '" + line + "'");
      told("the controller does not start");
      if (tries == 1) failing::over();
      if (tries == kMost) end(1, "wrong: the controller never starts");
    }
  }
  void open() {
    frugal_config config = FRUGAL_CONFIG_INIT;
    config.world_size = kRanks;
    config.flush_threads = options.threads;
    config.flush_mode = options.mode;
    config.staleness = options.staleness;
    config.timeout_ms = 4000;
    const bool serves = !peer.empty();
    if (serves)
      config.backing = FRUGAL_BACKING_SHM;
    else
      config.service = address.c_str();
    AGAIN(frugal_open(&config, &g_engine));
    if (serves) {
      AGAIN(frugal_serve(g_engine, address.c_str()));
      g_other = new Program("/proc/self/exe", peer);
    }
    dense = table("dense", FRUGAL_DENSE, kDense, FRUGAL_ADAGRAD);
    hashed = table("hashed", FRUGAL_HASHED, kHashed, FRUGAL_MOMENTUM);
    for (uint32_t r : ranks) join(r, serves ? 0 : FRUGAL_TRAINER_REPLACE, options.device);
  }
  uint64_t next_step() {
    uint64_t step = 0;
    AGAIN(frugal_committed_step(g_engine, &step));
    return step + 1;  // FRUGAL_NO_STEP is the last number
  }
  // From the step after the last one that is committed.
  void steps() {
    uint64_t step = next_step();
    declare(step);
    declare(step + 1);
    while (step < kSteps) {
      try {
        if (step == 3 && ranks.size() == kRanks && !wrote) {
          outside();
          declare(step);
          declare(step + 1);
        }
        train(step);
        declare(step + 2);
        ++step;
      } catch (Undone) {
        step = next_step();
      }
    }
  }
  uint64_t result() {
    Digest all;
    if (g_peer) {
      for (uint32_t r : ranks) AGAIN(frugal_trainer_close(trainers[r]));
    } else {
      AGAIN(frugal_flush(g_engine, FRUGAL_TIMEOUT_DEFAULT));
      std::vector<char> text(1 << 16);
      size_t size = 0;
      AGAIN(frugal_metrics(g_engine, text.data(), text.size(), &size));
      frugal_stats stats;
      stats.struct_size = sizeof stats;
      AGAIN(frugal_get_stats(g_engine, &stats));
      look(dense, kDense, &all);
      look(hashed, kHashed + 50, &all);
    }
    for (auto& [at, digest] : seen) all.add(&digest.value, sizeof digest.value);
    return all.value;
  }
  void close_engine() {
    if (!g_engine) return;
    failing::Call inside;
    const int32_t closed = frugal_close(std::exchange(g_engine, nullptr));
    if (closed != FRUGAL_OK) end(1, "wrong status of " + said("close", closed));
  }

  // One with ranks in the engine's own process: what it has lost is the other rank.
  void serve() {
    for (bool opened = false;;) {
      try {
        if (!std::exchange(opened, true)) open();
        steps();
        if (g_other && !g_other->says(&g_said, 3000)) {
          failing::over();
          (void)g_other->says(&g_said, -1);
        }
        if (g_said.compare(0, 3, "ok ") != 0) other_has_ended(g_said);
        g_other = nullptr;
        // A step that this rank has ended was undone if the other one was lost before it was
        // committed. The next call reports that.
        for (uint32_t r : ranks) {
          Op some(dense, keys_of(0, r, 3, 1), 0);
          AGAIN(frugal_prefetch(trainers[r], kSteps + 1, &some.op, 1, nullptr));
        }
        Digest all;
        const uint64_t mine = result();
        all.add(&mine, sizeof mine);
        all.add(g_said.data(), g_said.size());
        close_engine();
        finish(all.value);
      } catch (Lost) {
      } catch (Undone) {
      }
    }
  }
  void attached() {
    if (controller) start_controller();
    for (;;) {
      try {
        open();
        steps();
        const uint64_t digest = result();
        close_engine();
        if (controller) {
          g_other->stop();
          if (g_other->ended(true) != 0) end(1, "wrong: the controller did not end well");
        }
        finish(digest);
      } catch (Lost) {
        if (!g_peer && g_told == 3) failing::over();
      } catch (Undone) {
      }
      close_engine();
    }
  }
  [[noreturn]] void finish(uint64_t digest) {
    char line[64];
    std::snprintf(line, sizeof line, "ok %016llx", static_cast<unsigned long long>(digest));
    end(0, line + (g_peer ? "" : " told " + std::to_string(g_told)));
  }
};

}  // namespace

int main(int argc, char** argv) {
  Job job;
  std::vector<std::string> options;
  bool serves = false;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto number = [&] {
      if (i + 1 == argc) return 0ull;
      options.push_back(argv[i + 1]);
      return std::strtoull(argv[++i], nullptr, 10);
    };
    if (name[0] == '-' && name != "--serve" && name != "--peer") options.push_back(name);
    if (name == "--serve")
      serves = true;
    else if (name == "--peer")
      g_peer = true;
    else if (name == "--at-once")
      job.options.mode = FRUGAL_FLUSH_AT_ONCE;
    else if (name == "--threads")
      job.options.threads = static_cast<uint32_t>(number());
    else if (name == "--kill")
      job.options.kills = serves && !g_peer;
    else if (name == "--staleness")
      job.options.staleness = number();
    else if (name == "--gpu")
      job.options.device = "sim:0";
    else if (name[0] == '/' && g_peer)
      job.address = name;
    else if (name[0] == '/')
      job.controller = argv[i];
    else
      return std::fprintf(stderr, "unknown option %s\n", name.c_str()), 2;
  }
  if (!g_peer) {
    char made[] = "/tmp/frugal-failing-XXXXXX";
    if (!mkdtemp(made)) return 2;
    g_folder = made;
    job.address = g_folder + "/service";
  }
  job.ranks = {0, 1};
  if (serves) job.ranks = {0};
  if (g_peer) job.ranks = {1};
  if (!serves) job.attached();
  job.peer = {"peer_job", "--peer", job.address};
  job.peer.insert(job.peer.end(), options.begin(), options.end());
  job.serve();
}
