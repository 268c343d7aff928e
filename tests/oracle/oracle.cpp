// The oracle test: random runs of the engine against the one-thread reference, bit for bit.
//
//     oracle --seeds 1000 --first 1 --require 1000
//     oracle --seeds 100 --processes      with processes that attach, in the place of threads
//     oracle --seeds 240 --draw           each seed draws which kind of run it is, too
//     oracle --processes --killed         the controller is killed at last, its tables are read out
//     oracle --checkpoints                engines that go on from checkpoints of others
//     oracle --draw --record              without the reference: a line with hashes for each seed
//                                         (tests/record)
//
// Each seed is one configuration. A seed that fails is printed with the command that repeats it.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "oracle/checkpoints.h"
#include "oracle/device.h"
#include "oracle/driver.h"
#include "oracle/far.h"
#include "oracle/processes.h"
#include "oracle/random.h"
#include "oracle/replay.h"
#include "oracle/script.h"
#include "reference/reference.h"

namespace frugal_oracle {
namespace {

struct Arguments {
  uint64_t seeds = 100;
  uint64_t first = 1;
  int jobs = 3;
  bool verbose = false;
  bool keep_going = true;
  uint64_t require = 0;
  bool required = false;
  int64_t require_far = -1;  // rows that are loaded, leave and are refused a place
  int hang_seconds = 60;
  bool processes = false;
  bool draw = false;
  std::string controller;  // the program
  int lead = -1;           // this is a leader, and that is its descriptor
  Options options;
};

// What one worker is at.
struct Slot {
  std::atomic<uint64_t> seed{0};
  std::atomic<bool> runs{false};  // here; a leader watches its run by itself
  Progress progress;
  std::string repeat;  // the command; written while nothing runs
};

struct Totals {
  std::mutex mutex;
  uint64_t passed = 0;
  std::atomic<uint64_t> failed{0};
  uint64_t stale_runs = 0;
  // With processes:
  uint64_t attached = 0;  // runs
  uint64_t processes = 0;
  uint64_t programs = 0;  // runs of frugal-controller; in the others a process has the engine
  uint64_t shared = 0;    // runs where a process has several ranks
  uint64_t devices = 0;   // ranks on them that attach
  // Ranks without one, with less than half, less than all, all of the rows.
  uint64_t caches[4] = {0, 0, 0, 0};
  std::map<std::string, uint64_t> left_out;
  uint64_t rows_checked = 0;
  uint64_t older_rows = 0;
  uint64_t resumes = 0, other_worlds = 0, created = 0, deleted = 0;
  frugal_stats stats = {};
  FarCounts far = {};  // of runs with processes
  // Tables with a storage tier, and those of them with memory for at most 5 % of the rows.
  uint64_t far_tables = 0, scarce = 0;
};

int64_t NowMs() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void AddStats(const frugal_stats& from, frugal_stats* to) {
  // Everything after struct_size is a 64-bit counter.
  uint64_t a[sizeof(frugal_stats) / sizeof(uint64_t)];
  uint64_t b[sizeof(frugal_stats) / sizeof(uint64_t)];
  std::memcpy(a, &from, sizeof(from));
  std::memcpy(b, to, sizeof(*to));
  for (size_t i = 1; i < std::size(a); ++i) b[i] += a[i];
  std::memcpy(to, b, sizeof(b));
}

// What makes this run the one that it is.
std::vector<std::string> OptionArguments(const Options& options) {
  std::vector<std::string> list;
  auto add = [&](const char* name, const std::string& value) {
    list.push_back(name);
    if (!value.empty()) list.push_back(value);
  };
  if (options.tau_only) add("--tau-only", "");
  if (options.exact_only) add("--exact-only", "");
  if (options.flush_mode >= 0) add("--mode", std::to_string(options.flush_mode));
  if (options.flush_threads >= 0) add("--flush-threads", std::to_string(options.flush_threads));
  if (options.max_ranks != 8) add("--max-ranks", std::to_string(options.max_ranks));
  if (options.no_cache) add("--no-cache", "");
  if (!options.device.empty()) add("--device", options.device);
  if (options.scale != 1) add("--scale", std::to_string(options.scale));
  if (options.killed) add("--killed", "");
  if (options.far) add("--far", "");
  if (options.record) add("--record", "");
  if (options.checkpoints) add("--checkpoints", "");
  return list;
}

std::string RepeatCommand(const Arguments& arguments, uint64_t seed) {
  std::string command = "oracle --seeds 1 --jobs 1 --verbose --first " + std::to_string(seed);
  if (arguments.processes) command += " --processes";
  for (const std::string& argument : OptionArguments(arguments.options)) command += ' ' + argument;
  return command;
}

// --draw: which kind of run a seed is, too. Each kind finds faults that others hide: caches and
// staleness do without what declarations learn from each other, and flush threads hide a wrong
// priority by writing early.
Arguments Drawn(const Arguments& from, uint64_t seed) {
  Arguments run = from;
  const bool devices = !run.options.device.empty();
  run.options.device.clear();
  Random random(seed * 263);
  const size_t kind = random.Weighted({40, 12, 16, 12, 15, 5});
  if (kind == 1) run.options.tau_only = true;
  if (kind == 2) {
    run.options.flush_mode = FRUGAL_FLUSH_DEFERRED;
    run.options.flush_threads = 0;
    run.options.no_cache = run.options.exact_only = true;
  }
  if ((kind == 3 || kind == 5) && devices) {
    run.options.device = from.options.device;
    run.options.scale *= 0.3;
  }
  run.options.far = kFarStores && !run.options.record && Random(seed * 271).Chance(0.35);
  if (kind >= 4) {
    run.processes = true;
    run.options.scale *= kind == 5 ? 0.3 : 0.2;
    run.options.killed = run.options.record && Random(seed * 269).Chance(0.4);
  }
  return run;
}

void CountRun(const Layout& layout, Script* script, Totals* totals) {
  const std::lock_guard<std::mutex> lock(totals->mutex);
  ++totals->attached;
  totals->processes += layout.processes;
  totals->programs += layout.program ? 1 : 0;
  std::vector<uint32_t> ranks(layout.processes, 0);
  for (uint32_t process : layout.process_of_rank) ++ranks[process];
  totals->shared += *std::max_element(ranks.begin(), ranks.end()) > 1 ? 1 : 0;
  const std::string left_out = ForProcesses(script);
  if (!left_out.empty()) ++totals->left_out[left_out];
  for (uint32_t r = 0; r < script->ranks.size(); ++r) {
    const RankSpec& rank = script->ranks[r];
    totals->devices += !rank.device.empty() && layout.Attached(r) ? 1 : 0;
    const bool some = rank.cache_bytes > 0 || rank.cache_ratio > 0;
    ++totals->caches[!some ? 0 : rank.cache_ratio < 0.5 ? 1 : rank.cache_ratio < 1 ? 2 : 3];
  }
}

// The record of a run: its seed, hashes of what it drew, of its tables at last, of calls outside
// steps and of lookups, and what there was in it.
void PrintRecord(uint64_t seed, const Script& script, const Layout* layout,
                 const Outcome& outcome) {
  std::map<Outside, int> outside;
  for (const auto& [index, actions] : script.boundaries) {
    for (const OutsideAction& action : actions) ++outside[action.what];
  }
  uint64_t cached = 0, devices = 0;
  for (const RankSpec& rank : script.ranks) {
    cached += rank.cache_bytes > 0 || rank.cache_ratio > 0 ? 1 : 0;
    devices += rank.device.empty() ? 0 : 1;
  }
  char lookups[17] = "-";
  if (script.config.staleness == 0) {
    std::snprintf(lookups, sizeof(lookups), "%016llx",
                  static_cast<unsigned long long>(outcome.lookups));
  }
  std::printf(
      "config %llu %016llx %016llx %016llx %s ranks=%zu steps=%zu processes=%u killed=%d stale=%d "
      "aborts=%llu put=%d delete=%d sim=%llu cached=%llu\n",
      static_cast<unsigned long long>(seed), static_cast<unsigned long long>(script.Fingerprint()),
      static_cast<unsigned long long>(outcome.tables),
      static_cast<unsigned long long>(outcome.outside), lookups, script.ranks.size(), script.steps,
      layout != nullptr ? layout->processes : 0, script.killed ? 1 : 0,
      script.config.staleness != 0 ? 1 : 0, static_cast<unsigned long long>(script.aborts),
      outside[Outside::kPut], outside[Outside::kDelete], static_cast<unsigned long long>(devices),
      static_cast<unsigned long long>(cached));
  std::fflush(stdout);
}

void RunSeed(const Arguments& arguments, uint64_t seed, Slot* slot, Totals* totals) {
  const Arguments run = arguments.draw ? Drawn(arguments, seed) : arguments;
  const Options& options = run.options;
  const bool processes = run.processes;
  Script script = MakeScript(seed, options);
  if (arguments.verbose) {
    std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed),
                script.Describe().c_str());
    std::fflush(stdout);
  }
  Outcome outcome;
  std::string described = script.Describe();
  Layout layout;
  if (processes) {
    layout = MakeLayout(script);
    described += "; " + layout.Describe();
    std::vector<std::string> list = OptionArguments(options);
    for (const std::string& argument :
         {std::string("--first"), std::to_string(seed), std::string("--hang-seconds"),
          std::to_string(arguments.hang_seconds), std::string("--controller"),
          arguments.controller}) {
      list.push_back(argument);
    }
    outcome = RunLeader(list);
    CountRun(layout, &script, totals);
  } else {
    if (options.checkpoints) AddCheckpoints(&script);
    frugal_reference::Reference reference(script.config.seed, script.config.world_size);
    if (options.record) {
      AddTables(script, &reference);
    } else {
      Replay(&script, &reference);
    }
    slot->seed = seed;
    slot->repeat = RepeatCommand(run, seed);
    slot->progress.Enter("opening");  // a move, before the watchdog polls for one
    slot->runs = true;
    outcome = RunScript(script, reference, options.record, &slot->progress);
    slot->runs = false;
  }

  const std::lock_guard<std::mutex> lock(totals->mutex);
  if (outcome.passed) {
    ++totals->passed;
  } else {
    ++totals->failed;
  }
  totals->stale_runs += script.config.staleness != 0 ? 1 : 0;
  totals->rows_checked += outcome.rows_checked;
  totals->older_rows += outcome.older_rows;
  totals->resumes += outcome.resumes;
  totals->other_worlds += outcome.other_worlds;
  totals->created += outcome.created;
  totals->deleted += outcome.deleted;
  AddStats(outcome.stats, &totals->stats);
  totals->far.loaded += outcome.far.loaded;
  totals->far.left += outcome.far.left;
  totals->far.refused += outcome.far.refused;
  for (const TableSpec& table : script.tables) {
    totals->far_tables += table.places != 0 ? 1 : 0;
    totals->scarce += table.places != 0 && table.places * 20 <= table.config.rows ? 1 : 0;
  }
  if (options.record && outcome.passed)
    PrintRecord(seed, script, processes ? &layout : nullptr, outcome);
  if (arguments.verbose) {
    const frugal_stats& stats = outcome.stats;
    std::printf(
        "seed %llu: waits %llu, rises %llu, falls %llu, in flight %llu, dirty evictions "
        "%llu, back-pressure %llu, apart %llu\n",
        static_cast<unsigned long long>(seed), static_cast<unsigned long long>(stats.gate_waits),
        static_cast<unsigned long long>(stats.priority_rises),
        static_cast<unsigned long long>(stats.priority_falls),
        static_cast<unsigned long long>(stats.gate_in_flight),
        static_cast<unsigned long long>(stats.cache_evicted_dirty),
        static_cast<unsigned long long>(stats.back_pressure),
        static_cast<unsigned long long>(stats.ranks_apart));
  }
  if (!outcome.passed) {
    std::printf("FAILED seed %llu: %s\n  run: %s\n  repeat: %s\n",
                static_cast<unsigned long long>(seed), outcome.message.c_str(), described.c_str(),
                RepeatCommand(run, seed).c_str());
    std::fflush(stdout);
  }
}

// A run that hangs cannot be ended from outside, so the whole process is.
void Watch(const Arguments& arguments, const std::vector<std::unique_ptr<Slot>>& slots,
           const std::atomic<bool>& done) {
  constexpr uint64_t kTicks = 5;  // a second
  std::vector<Stillness> stillness(slots.size());
  while (!done) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1000 / kTicks));
    for (size_t i = 0; i < slots.size(); ++i) {
      const Slot& slot = *slots[i];
      const uint64_t still = stillness[i].Tick(slot.progress);
      if (!slot.runs || still < static_cast<uint64_t>(arguments.hang_seconds) * kTicks) continue;
      std::printf("HANGS seed %llu (%s): nothing moves for %d s\n  repeat: %s\n",
                  static_cast<unsigned long long>(slot.seed.load()), slot.progress.phase.load(),
                  arguments.hang_seconds, slot.repeat.c_str());
      for (size_t r = 0; r < Progress::kRanks; ++r) {
        const Progress::Rank& rank = slot.progress.ranks[r];
        std::printf("  rank %zu: step %llu, %s\n", r,
                    static_cast<unsigned long long>(rank.step.load()), rank.doing.load());
      }
      std::fflush(stdout);
      _exit(3);
    }
  }
}

bool PrintProcesses(const Arguments& arguments, const Totals& totals) {
  const std::pair<const char*, uint64_t> lines[] = {
      {"processes", totals.processes},
      {"runs of the program", totals.programs},
      {"runs of one of them", totals.attached - totals.programs},
      {"runs with ranks together", totals.shared},
      {"ranks without a cache", totals.caches[0]},
      {"ranks with under half", totals.caches[1]},
      {"ranks with under all", totals.caches[2]},
      {"ranks with all rows", totals.caches[3]},
  };
  bool enough = true;
  auto print = [&](const char* name, uint64_t value) {
    const bool none = arguments.required && value == 0;
    std::printf("  %-24s %12llu%s\n", name, static_cast<unsigned long long>(value),
                none ? "   NONE" : "");
    enough = enough && !none;
  };
  for (const auto& [name, value] : lines) print(name, value);
  if (!arguments.options.device.empty()) print("attached, on devices", totals.devices);
  for (const auto& [name, count] : totals.left_out) {
    std::printf("  left out, not possible over processes: %s (%llu runs)\n", name.c_str(),
                static_cast<unsigned long long>(count));
  }
  return enough;
}

bool PrintTotals(const Arguments& arguments, const Totals& totals) {
  const frugal_stats& s = totals.stats;
  struct Line {
    const char* name;
    uint64_t value;
    bool required;
  };
  const Line lines[] = {
      {"gate waits", s.gate_waits, true},
      {"priority rises", s.priority_rises, true},
      {"priority falls", s.priority_falls, true},
      {"in flight at a gate", s.gate_in_flight, true},
      {"dirty evictions", s.cache_evicted_dirty, true},
      {"cache plans carried out", s.cache_planned, true},
      {"back-pressure", s.back_pressure, true},
      {"ranks apart", s.ranks_apart, true},
      {"stale reads", s.stale_reads, false},
      {"rows of an older step", totals.older_rows, false},
      {"rows compared", totals.rows_checked, false},
      {"steps committed", s.steps_committed, false},
      {"steps aborted", s.steps_aborted, false},
      {"rows updated", s.rows_updated, false},
      {"rows deferred", s.rows_deferred, false},
      {"lookup waits", s.lookup_waits, false},
      {"cache hits", s.cache_hits, false},
      {"cache evictions", s.cache_evicted, false},
      {"steps at once", s.modes_at_once, false},
      {"steps deferred", s.modes_deferred, false},
  };
  bool enough = true;
  for (const Line& line : lines) {
    const bool short_of = arguments.required && line.required && line.value <= arguments.require;
    std::printf("  %-24s %12llu%s\n", line.name, static_cast<unsigned long long>(line.value),
                short_of ? "   TOO FEW" : "");
    enough = enough && !short_of;
  }
  if (totals.far_tables != 0 || arguments.require_far >= 0) {
    const FarCounts here = CountFar();
    const std::pair<const char*, uint64_t> far[] = {
        {"rows loaded", here.loaded + totals.far.loaded},
        {"rows that left", here.left + totals.far.left},
        {"rows refused a slot", here.refused + totals.far.refused}};
    for (const auto& [name, value] : far) {
      const bool short_of =
          arguments.require_far >= 0 && value <= static_cast<uint64_t>(arguments.require_far);
      std::printf("  %-24s %12llu%s\n", name, static_cast<unsigned long long>(value),
                  short_of ? "   TOO FEW" : "");
      enough = enough && !short_of;
    }
    const bool few = arguments.require_far >= 0 &&
                     (totals.far_tables == 0 || totals.scarce * 3 < totals.far_tables);
    std::printf("  %-24s %12llu\n  %-24s %12llu%s\n", "tables with storage tier",
                static_cast<unsigned long long>(totals.far_tables), "of these for 5 % or less",
                static_cast<unsigned long long>(totals.scarce), few ? "   TOO FEW" : "");
    enough = enough && !few;
  }
  if (arguments.options.checkpoints) {
    const std::pair<const char*, uint64_t> counts[] = {
        {"checkpoints", s.checkpoints},
        {"engines that went on", totals.resumes},
        {"of another world size", totals.other_worlds},
        {"rows copied to be changed", s.checkpoint_copies},
        {"rows saved in time", s.checkpoint_rows - s.checkpoint_copies},
        {"rows created meanwhile", totals.created},
        {"rows deleted meanwhile", totals.deleted},
        {"gates that waited for it", s.checkpoint_waits}};
    for (const auto& [name, value] : counts) {
      // Only the program with the engine's parts makes gates wait.
      const bool may_be_none = &value == &counts[std::size(counts) - 1].second && !kDeviceMemory;
      const bool few = arguments.required && value <= arguments.require && !may_be_none;
      std::printf("  %-24s %12llu%s\n", name, static_cast<unsigned long long>(value),
                  few ? "   TOO FEW" : "");
      enough = enough && !few;
    }
  }
  // Bounded staleness that is never used would be checked by nothing.
  if (totals.stale_runs >= 20 && totals.older_rows == 0) {
    std::printf("  no row was ever of an older step: the staleness bound is not used\n");
    enough = false;
  }
  if (arguments.processes || arguments.draw) enough = PrintProcesses(arguments, totals) && enough;
  return enough;
}

[[noreturn]] void Usage() {
  std::fprintf(stderr,
               "usage: oracle [--seeds N] [--first SEED] [--jobs J] [--verbose] [--require N]\n"
               "              [--tau-only | --exact-only] [--mode FLUSH_MODE]\n"
               "              [--flush-threads N] [--max-ranks N] [--no-cache] [--scale X]\n"
               "              [--hang-seconds S] [--stop]\n"
               "              [--device sim:N|cuda:N[,...]] [--processes [--controller PROGRAM]]\n"
               "              [--draw] [--killed] [--record] [--far] [--require-far N]\n"
               "              [--checkpoints]\n");
  std::exit(2);
}

Arguments Parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    auto number = [&]() -> uint64_t {
      if (i + 1 >= argc) Usage();
      return std::strtoull(argv[++i], nullptr, 10);
    };
    if (name == "--seeds") {
      arguments.seeds = number();
    } else if (name == "--first") {
      arguments.first = number();
    } else if (name == "--jobs") {
      arguments.jobs = std::max(1, static_cast<int>(number()));
    } else if (name == "--verbose") {
      arguments.verbose = true;
    } else if (name == "--stop") {
      arguments.keep_going = false;
    } else if (name == "--require") {
      arguments.require = number();
      arguments.required = true;
    } else if (name == "--require-far") {
      arguments.require_far = static_cast<int64_t>(number());
    } else if (name == "--tau-only") {
      arguments.options.tau_only = true;
    } else if (name == "--exact-only") {
      arguments.options.exact_only = true;
    } else if (name == "--mode") {
      arguments.options.flush_mode = static_cast<int>(number());
    } else if (name == "--flush-threads") {
      arguments.options.flush_threads = static_cast<int>(number());
    } else if (name == "--max-ranks") {
      arguments.options.max_ranks = static_cast<int>(number());
    } else if (name == "--no-cache") {
      arguments.options.no_cache = true;
    } else if (name == "--device") {
      if (i + 1 >= argc) Usage();
      arguments.options.device = argv[++i];
    } else if (name == "--scale") {
      if (i + 1 >= argc) Usage();
      arguments.options.scale = std::strtod(argv[++i], nullptr);
    } else if (name == "--draw") {
      arguments.draw = true;
    } else if (name == "--processes") {
      arguments.processes = true;
    } else if (name == "--controller") {
      if (i + 1 >= argc) Usage();
      arguments.controller = argv[++i];
    } else if (name == "--killed") {
      arguments.options.killed = true;
    } else if (name == "--far") {
      arguments.options.far = true;
    } else if (name == "--record") {
      arguments.options.record = true;
    } else if (name == "--checkpoints") {
      arguments.options.checkpoints = true;
    } else if (name == "--lead") {
      arguments.lead = static_cast<int>(number());
    } else if (name == "--hang-seconds") {
      arguments.hang_seconds = static_cast<int>(number());
    } else {
      Usage();
    }
  }
  if (arguments.options.killed && !arguments.processes && arguments.lead < 0) Usage();
  if (arguments.options.checkpoints &&
      (arguments.processes || arguments.draw || arguments.options.far || arguments.options.record))
    Usage();
  if (arguments.options.far && !kFarStores) Usage();  // the C ABI alone has none
  if (arguments.controller.empty()) {                 // as the build has them
    char self[4096];
    const ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    const std::string program(self, n > 0 ? static_cast<size_t>(n) : 0);
    arguments.controller =
        program.substr(0, program.rfind('/') + 1) + "../tools/controller/frugal-controller";
  }
  return arguments;
}

int Main(int argc, char** argv) {
  const Arguments arguments = Parse(argc, argv);
  if (arguments.lead >= 0) {
    return Lead(arguments.first, arguments.options, arguments.controller, arguments.hang_seconds,
                arguments.lead);
  }
  const int64_t start = NowMs();
  Totals totals;
  std::atomic<uint64_t> next{0};
  std::atomic<bool> done{false};
  std::vector<std::unique_ptr<Slot>> slots;
  for (int j = 0; j < arguments.jobs; ++j) slots.push_back(std::make_unique<Slot>());
  std::thread watchdog([&] { Watch(arguments, slots, done); });
  // Several runs at once are several engines in one process.
  std::vector<std::thread> workers;
  for (int j = 0; j < arguments.jobs; ++j) {
    workers.emplace_back([&, slot = slots[static_cast<size_t>(j)].get()] {
      for (uint64_t i = next++; i < arguments.seeds; i = next++) {
        RunSeed(arguments, arguments.first + i, slot, &totals);
        if (!arguments.keep_going && totals.failed > 0) break;
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  done = true;
  watchdog.join();
  const bool enough = arguments.options.record || PrintTotals(arguments, totals);
  std::printf("  %-24s %10.1f s\n", "time", static_cast<double>(NowMs() - start) / 1000);
  std::printf("oracle: %llu passed, %llu failed\n", static_cast<unsigned long long>(totals.passed),
              static_cast<unsigned long long>(totals.failed.load()));
  return totals.failed == 0 && enough ? 0 : 1;
}

}  // namespace
}  // namespace frugal_oracle

int main(int argc, char** argv) { return frugal_oracle::Main(argc, argv); }
