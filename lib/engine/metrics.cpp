// The metrics of an engine, as the text that Prometheus scrapes, and the start of a trace.
#include <cstdarg>
#include <cstdio>

#include "engine/engine.h"

namespace frugal {
namespace {

enum class Kind { kCount, kTime, kGauge };

class Exposition {
 public:
  explicit Exposition(String* out) : out_(*out) {}

  // Begins a family: the lines of its samples follow.
  void family(const char* name, const char* type, const char* help) {
    name_ = name;
    add("# HELP frugal_%s %s\n# TYPE frugal_%s %s\n", name, help, name, type);
  }
  void sample(uint64_t value) {
    add("frugal_%s %llu\n", name_.c_str(), static_cast<unsigned long long>(value));
  }
  void sample(const char* label, const String& of, uint64_t value) {
    add("frugal_%s{%s=\"", name_.c_str(), label);
    append_escaped(of.data(), of.size(), false, &out_);
    add("\"} %llu\n", static_cast<unsigned long long>(value));
  }
  void seconds(uint64_t ns) {
    add("frugal_%s %llu.%09u\n", name_.c_str(), static_cast<unsigned long long>(ns / 1000000000u),
        static_cast<unsigned>(ns % 1000000000u));
  }
  void seconds(const char* label, const String& of, uint64_t ns) {
    add("frugal_%s{%s=\"", name_.c_str(), label);
    append_escaped(of.data(), of.size(), false, &out_);
    add("\"} %llu.%09u\n", static_cast<unsigned long long>(ns / 1000000000u),
        static_cast<unsigned>(ns % 1000000000u));
  }
  void status(Status value) { add("frugal_%s %d\n", name_.c_str(), static_cast<int>(value)); }

  // A counter of frugal_stats under its name there, with the units and suffixes that are customary.
  void stat(const char* name, Kind kind, const char* help, uint64_t value) {
    String s = name;
    switch (kind) {
      case Kind::kTime:
        s.resize(s.size() - 3);  // _ns
        family((s += "_seconds_total").c_str(), "counter", help);
        return seconds(value);
      case Kind::kCount:
        family((s += "_total").c_str(), "counter", help);
        return sample(value);
      case Kind::kGauge:
        family(s.c_str(), "gauge", help);
        return sample(value);
    }
  }

 private:
  [[gnu::format(printf, 2, 3)]] void add(const char* format, ...) {
    char line[512];
    va_list args;
    va_start(args, format);
    const int n = std::vsnprintf(line, sizeof line, format, args);
    va_end(args);
    out_.append(line, std::min(static_cast<size_t>(n), sizeof line - 1));
  }

  String& out_;
  String name_;
};

constexpr bool ends_in_ns(const char* name) {
  size_t n = 0;
  while (name[n]) ++n;
  return n > 3 && name[n - 3] == '_' && name[n - 2] == 'n' && name[n - 1] == 's';
}
#define X(name, kind, help)                                       \
  static_assert((Kind::kind == Kind::kTime) == ends_in_ns(#name), \
                "of times the names end in _ns: " #name);
FRUGAL_STATS(X, X, X)
#undef X

}  // namespace

// A list: a line or two for each metric.
Status Engine::metrics(String* text_out) {
  const uint64_t now = now_ns();
  frugal_stats s;
  (void)stats(&s);
  struct OfTrainer {
    uint32_t rank;
    uint64_t step;
    bool in_step;
    TrainerRef trainer;
  };
  Vector<OfTrainer> trainers;
  Vector<TableRef> tables;
  uint64_t last = kNoStep;
  (void)committed(&last);
  {
    ControlLock lock(mu_);
    tables = tables_.all();
    for (const TrainerRef& t : ranks_)
      if (t) trainers.push_back({t->rank, t->step, t->in_step, t});
  }

  String out;
  out.reserve(8192);
  Exposition e(&out);
#define X(name, kind, help) e.stat(#name, Kind::kind, help, s.name);
  FRUGAL_STATS(X, X, X)
#undef X
  e.family("uptime_seconds", "gauge", "Time since the engine was opened.");
  e.seconds(now - opened_ns_);
  e.family("health", "gauge", "0, or the status of the first background failure.");
  e.status(health());
  e.family("flush_threads", "gauge",
           "Flush threads; 0 while they rest and the trainers' calls do their work.");
  e.sample(workers_.callers_work() ? 0 : config_.flush_threads);
  e.family("world_size", "gauge", "Ranks.");
  e.sample(config_.world_size);
  e.family("committed_step", "gauge", "The last step that all ranks have ended, if any.");
  if (last != kNoStep) e.sample(last);
  e.family("table_rows", "gauge", "Rows of the table.");
  for (const TableRef& t : tables) e.sample("table", t->name, t->rows.count());
  e.family("table_bytes", "gauge", "Memory that the table holds.");
  for (const TableRef& t : tables) e.sample("table", t->name, t->rows.memory_bytes());
  e.family("trainer_step", "gauge", "The step that the rank has begun last, if any.");
  for (const OfTrainer& t : trainers)
    if (t.step != kNoStep) e.sample("rank", text("%u", t.rank), t.step);
  e.family("trainer_in_step", "gauge", "Whether the rank is inside of that step.");
  for (const OfTrainer& t : trainers) e.sample("rank", text("%u", t.rank), t.in_step);
  using Counts = TrainerCounts;
  const auto of_each = [&](const char* name, const char* type, const char* help,
                           std::atomic<uint64_t> Counts::*count) {
    e.family(name, type, help);
    for (const OfTrainer& t : trainers)
      e.sample("rank", text("%u", t.rank), (t.trainer->counts.*count).load());
  };
  of_each("trainer_keys_looked_up_total", "counter",
          "Keys of lookups of the rank, since it joined.", &Counts::keys_looked_up);
  of_each("trainer_keys_pushed_total", "counter", "Keys of its pushes.", &Counts::keys_pushed);
  of_each("trainer_cache_hits_total", "counter", "Keys served from its cache.",
          &Counts::cache_hits);
  of_each("trainer_cache_misses_total", "counter", "Keys that its cache did not have.",
          &Counts::cache_misses);
  of_each("trainer_host_cache_bytes", "gauge", "Memory of its cache, in host memory.",
          &Counts::host_cache_bytes);
  of_each("trainer_hbm_cache_bytes", "gauge", "Memory of its cache, on its GPU.",
          &Counts::hbm_cache_bytes);
  e.family("trainer_gate_wait_seconds_total", "counter",
           "Time that its calls of step_begin waited.");
  for (const OfTrainer& t : trainers)
    e.seconds("rank", text("%u", t.rank), t.trainer->counts.gate_wait_ns.load());
  *text_out = std::move(out);
  return FRUGAL_OK;
}

Status Engine::start_trace(size_t events, uint64_t* id) {
  FRUGAL_TRY(meters_.trace.start(events, id));
  ControlLock lock(mu_);
  for (const TableRef& t : tables_) meters_.trace.name_table(t->number, t->name);
  return FRUGAL_OK;
}

}  // namespace frugal
