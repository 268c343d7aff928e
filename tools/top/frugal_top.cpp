// frugal-top: what a running engine does, in a terminal.
//
//     frugal-top ADDRESS               asks the controller at that address
//     frugal-top --from FILE           reads a file to which a program writes frugal_metrics
//         --interval SECONDS           time between two reads; default 1
//         --once                       reads once: means since the engine was opened
//         --json                       prints a line of JSON for each read
//
// It uses only the C ABI, and of that the text of frugal_metrics: all numbers, and the time between
// two texts, are the engine's own.
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "frugal.h"

namespace {

constexpr int kFailed = 1, kUsage = 2;

int Usage() {
  std::fputs(
      "frugal-top ADDRESS | --from FILE   [--interval SECONDS] [--once] [--json]\n"
      "  ADDRESS            of a controller, as in frugal_config.service\n"
      "  --from FILE        text of frugal_metrics, read anew for each sample\n"
      "  --interval SECONDS between two samples; default 1\n"
      "  --once             one sample, means since the engine was opened\n"
      "  --json             a line of JSON for each sample\n",
      stderr);
  return kUsage;
}

// --- Where the text comes from ---

class Source {
 public:
  ~Source() { frugal_close(engine_); }
  bool Attach(const std::string& address) {
    frugal_config config = FRUGAL_CONFIG_INIT;
    config.service = address.c_str();
    config.flags = FRUGAL_OBSERVE;
    config.timeout_ms = 3000;  // waits so long for a controller at the address
    return Ok(frugal_open(&config, &engine_));
  }
  void From(const std::string& file) { file_ = file; }

  bool Read(std::string* text) {
    if (!file_.empty()) {
      std::ifstream file(file_);
      std::stringstream all;
      all << file.rdbuf();
      *text = all.str();
      if (file) return true;
      std::fprintf(stderr, "frugal-top: '%s' cannot be read: %s\n", file_.c_str(),
                   std::strerror(errno));
      return false;
    }
    for (;;) {
      size_t size = 0;
      const int32_t status = frugal_metrics(engine_, text->data(), text->size(), &size);
      if (status == FRUGAL_ERR_OVERFLOW) {
        text->resize(size + 1024);
        continue;
      }
      if (!Ok(status)) return false;
      text->resize(size - 1);
      return true;
    }
  }

 private:
  static bool Ok(int32_t status) {
    if (status == FRUGAL_OK) return true;
    frugal_error error;
    frugal_last_error(&error);
    std::fprintf(stderr, "frugal-top: %s: %s\n", frugal_status_name(status), error.message);
    return false;
  }

  frugal_engine* engine_ = nullptr;
  std::string file_;
};

// --- What is in it ---

struct Sample {
  // By name without "frugal_"; those with a label by the label's text, too.
  std::map<std::string, double> plain;
  std::map<std::string, std::map<std::string, double>> labelled;

  double operator()(const std::string& name) const {
    const auto at = plain.find(name);
    return at == plain.end() ? 0 : at->second;
  }
  bool has(const std::string& name) const { return plain.count(name) != 0; }
  const std::map<std::string, double>& of(const std::string& name) const {
    static const std::map<std::string, double> none;
    const auto at = labelled.find(name);
    return at == labelled.end() ? none : at->second;
  }
};

// The text of a label, without its escapes.
std::string Unescaped(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\\' || i + 1 == text.size()) {
      out += text[i];
    } else {
      ++i;
      out += text[i] == 'n' ? '\n' : text[i];
    }
  }
  return out;
}

// Returns false if it is no text of frugal_metrics, or an incomplete one.
bool Parse(const std::string& text, Sample* out) {
  *out = {};
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line[0] == '#') continue;
    const size_t space = line.rfind(' ');
    if (space == std::string::npos || line.rfind("frugal_", 0) != 0) return false;
    char* end = nullptr;
    const double value = std::strtod(line.c_str() + space + 1, &end);
    if (end == line.c_str() + space + 1 || *end != 0) return false;
    const std::string name = line.substr(7, space - 7);
    const size_t brace = name.find('{');
    if (brace == std::string::npos) {
      out->plain[name] = value;
      continue;
    }
    const size_t quote = name.find('"', brace);
    if (quote == std::string::npos || name.size() < quote + 3) return false;
    out->labelled[name.substr(0, brace)]
                 [Unescaped(name.substr(quote + 1, name.size() - quote - 3))] = value;
  }
  return out->has("uptime_seconds");
}

// --- What is shown ---

struct Trainer {
  std::string rank;
  double step = -1;  // -1: none yet
  bool in_step = false;
  double looked_up = 0, pushed = 0;  // keys a second
  double hit_rate = -1;
  double stall = 0;
  double cache_bytes = 0;
};

struct Table {
  std::string name;
  double rows = 0, bytes = 0;
};

struct View {
  double uptime = 0, span = 0, committed = -1;
  int32_t health = 0;
  double world = 0;
  double steps = 0, rows = 0, keys = 0, created = 0, aborted = 0;  // a second
  double hit_rate = -1;                                            // -1: no cache was asked
  double stall = 0;     // share of the trainers' time spent at gates
  double deferred = 0;  // share of the written rows that were deferred
  double writing = 0;   // processors that apply updates
  double pending_rows = 0, pending_bytes = 0, pending_peak = 0;
  // The tiers: caches on GPUs and in host memory, tables.
  double hbm_bytes = 0, cache_bytes = 0, host_bytes = 0;
  std::vector<Trainer> trainers;
  std::vector<Table> tables;
};

double Share(double part, double whole) { return whole > 0 ? part / whole : 0; }

// What happened from `before` (all zeros: the engine's opening) to `now`.
View Between(const Sample& before, const Sample& now) {
  View v;
  v.uptime = now("uptime_seconds");
  v.span = v.uptime - before("uptime_seconds");
  const auto more = [&](const char* name) { return now(name) - before(name); };
  const auto rate = [&](const char* name) { return Share(more(name), v.span); };
  v.health = static_cast<int32_t>(now("health"));
  v.world = now("world_size");
  if (now.has("committed_step")) v.committed = now("committed_step");
  v.steps = rate("steps_committed_total");
  v.aborted = rate("steps_aborted_total");
  v.rows = rate("rows_updated_total");
  v.keys = rate("keys_looked_up_total");
  v.created = rate("rows_created_total");
  const double asked = more("cache_hits_total") + more("cache_misses_total");
  if (asked > 0) v.hit_rate = more("cache_hits_total") / asked;
  v.stall = Share(rate("gate_wait_seconds_total"), v.world);
  v.deferred = Share(more("rows_deferred_total"), more("rows_updated_total"));
  v.writing = rate("apply_seconds_total");
  v.pending_rows = now("pending_rows");
  v.pending_bytes = now("pending_bytes");
  v.pending_peak = now("pending_bytes_peak");
  const auto value = [](const std::map<std::string, double>& of, const std::string& label,
                        double none = 0) {
    const auto at = of.find(label);
    return at == of.end() ? none : at->second;
  };
  for (const auto& [rank, inside] : now.of("trainer_in_step")) {
    // Less than before: a new trainer has this rank, and its counters began at 0.
    const auto gained = [&](const std::map<std::string, double>& then,
                            const std::map<std::string, double>& since) {
      const double has = value(since, rank), had = value(then, rank);
      return has < had ? has : has - had;
    };
    Trainer t;
    t.rank = rank;
    t.in_step = inside != 0;
    t.step = value(now.of("trainer_step"), rank, -1);
    t.looked_up = Share(
        gained(before.of("trainer_keys_looked_up_total"), now.of("trainer_keys_looked_up_total")),
        v.span);
    t.pushed =
        Share(gained(before.of("trainer_keys_pushed_total"), now.of("trainer_keys_pushed_total")),
              v.span);
    const double hits =
        gained(before.of("trainer_cache_hits_total"), now.of("trainer_cache_hits_total"));
    const double misses =
        gained(before.of("trainer_cache_misses_total"), now.of("trainer_cache_misses_total"));
    if (hits + misses > 0) t.hit_rate = hits / (hits + misses);
    t.stall = Share(gained(before.of("trainer_gate_wait_seconds_total"),
                           now.of("trainer_gate_wait_seconds_total")),
                    v.span);
    const double hbm = value(now.of("trainer_hbm_cache_bytes"), rank),
                 host = value(now.of("trainer_host_cache_bytes"), rank);
    t.cache_bytes = hbm + host;
    v.hbm_bytes += hbm;
    v.cache_bytes += host;
    v.trainers.push_back(t);
  }
  for (const auto& [name, rows] : now.of("table_rows")) {
    v.tables.push_back({name, rows, value(now.of("table_bytes"), name)});
    v.host_bytes += v.tables.back().bytes;
  }
  return v;
}

std::string Format(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

std::string Large(double value, double unit, const char* const* names) {
  int i = 0;
  for (; value >= unit * 0.9995 && i < 5; ++i) value /= unit;
  return Format(i == 0 && value == std::floor(value) ? "%.0f"
                : value < 10                         ? "%.2f"
                : value < 100                        ? "%.1f"
                                                     : "%.0f",
                value) +
         names[i];
}

std::string Number(double value) {
  static const char* const names[] = {"", " k", " M", " G", " T", " P"};
  return Large(value, 1000, names);
}

std::string Bytes(double value) {
  static const char* const names[] = {" B", " KiB", " MiB", " GiB", " TiB", " PiB"};
  return Large(value, 1024, names);
}

std::string Percent(double share) { return Format("%.1f %%", share * 100); }

// A name for a terminal: without control characters, which the terminal would obey, and not too
// wide.
std::string Plain(const std::string& name) {
  std::string out;
  const auto byte = [&](size_t i) {
    return i < name.size() ? static_cast<unsigned char>(name[i]) : 0u;
  };
  for (size_t i = 0; i < name.size(); ++i) {
    if (out.size() >= 32) return out + "...";
    // U+0080 to U+009F in UTF-8.
    const bool two = byte(i) == 0xc2 && byte(i + 1) >= 0x80 && byte(i + 1) < 0xa0;
    out += two || byte(i) < 0x20 || byte(i) == 0x7f ? '?' : name[i];
    i += two;
  }
  return out;
}

std::string Text(const View& v) {
  std::string out;
  const auto line = [&](const std::string& text) { out += text + '\n'; };
  line("frugal  up " + Format("%.0f s", v.uptime) + "   health " + frugal_status_name(v.health) +
       "   committed step " + (v.committed < 0 ? "none" : Format("%.0f", v.committed)) +
       "   ranks " + std::to_string(v.trainers.size()) + " of " + Format("%.0f", v.world));
  line("steps/s " + Number(v.steps) + "   rows/s " + Number(v.rows) + "   keys/s " +
       Number(v.keys) + "   new rows/s " + Number(v.created) +
       (v.aborted > 0 ? "   aborts/s " + Number(v.aborted) : ""));
  line("stall " + Percent(v.stall) + "   cache hits " +
       (v.hit_rate < 0 ? "-" : Percent(v.hit_rate)) + "   deferred " + Percent(v.deferred) +
       "   writing " + Format("%.2f cores", v.writing));
  line("pending " + Number(v.pending_rows) + " rows, " + Bytes(v.pending_bytes) + " (peak " +
       Bytes(v.pending_peak) + ")");
  line("tiers   caches on GPUs " + Bytes(v.hbm_bytes) + ", caches in host memory " +
       Bytes(v.cache_bytes) + ", tables in host memory " + Bytes(v.host_bytes));
  if (!v.trainers.empty()) {
    line("\n  rank         step  where      keys/s   pushed/s    stall     hits      cache");
    for (const Trainer& t : v.trainers) {
      char row[160];
      std::snprintf(row, sizeof(row), "%6s %12s  %-7s %9s  %9s %8s %8s %10s", t.rank.c_str(),
                    t.step < 0 ? "-" : Format("%.0f", t.step).c_str(),
                    t.in_step    ? "inside"
                    : t.step < 0 ? "joined"
                                 : "between",
                    Number(t.looked_up).c_str(), Number(t.pushed).c_str(), Percent(t.stall).c_str(),
                    t.hit_rate < 0 ? "-" : Percent(t.hit_rate).c_str(),
                    Bytes(t.cache_bytes).c_str());
      line(row);
    }
  }
  if (!v.tables.empty()) {
    line("\n        rows      memory  table");
    for (const Table& t : v.tables) {
      char row[160];
      std::snprintf(row, sizeof(row), "%12s %11s  %s", Number(t.rows).c_str(),
                    Bytes(t.bytes).c_str(), Plain(t.name).c_str());
      line(row);
    }
  }
  return out;
}

std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    char code[8];
    std::snprintf(code, sizeof(code), "\\u%04x", static_cast<unsigned char>(c));
    if (c == '"' || c == '\\')
      (out += '\\') += c;
    else
      out += static_cast<unsigned char>(c) < 0x20 ? std::string(code) : std::string(1, c);
  }
  return out + '"';
}

std::string Json(const View& v) {
  std::string out = "{";
  const auto field = [&](const std::string& name, const std::string& value) {
    if (out.back() != '{') out += ',';
    out += '"' + name + "\":" + value;
  };
  const auto number = [&](const std::string& name, double value) {
    field(name, Format("%.17g", value));
  };
  number("uptime", v.uptime);
  number("seconds", v.span);
  field("health", Quoted(frugal_status_name(v.health)));
  number("world_size", v.world);
  field("committed_step", v.committed < 0 ? "null" : Format("%.0f", v.committed));
  number("steps_per_second", v.steps);
  number("aborts_per_second", v.aborted);
  number("rows_per_second", v.rows);
  number("keys_per_second", v.keys);
  number("new_rows_per_second", v.created);
  field("hit_rate", v.hit_rate < 0 ? "null" : Format("%.17g", v.hit_rate));
  number("stall", v.stall);
  number("deferred", v.deferred);
  number("writing_cores", v.writing);
  number("pending_rows", v.pending_rows);
  number("pending_bytes", v.pending_bytes);
  number("pending_bytes_peak", v.pending_peak);
  field("tiers", "{\"hbm_caches\":" + Format("%.0f", v.hbm_bytes) +
                     ",\"host_caches\":" + Format("%.0f", v.cache_bytes) +
                     ",\"host_tables\":" + Format("%.0f", v.host_bytes) + "}");
  std::string list;
  for (const Trainer& t : v.trainers)
    list += std::string(list.empty() ? "" : ",") + "{\"rank\":" + t.rank +
            ",\"step\":" + (t.step < 0 ? "null" : Format("%.0f", t.step)) +
            ",\"in_step\":" + (t.in_step ? "true" : "false") +
            ",\"keys_per_second\":" + Format("%.17g", t.looked_up) +
            ",\"pushed_per_second\":" + Format("%.17g", t.pushed) +
            ",\"hit_rate\":" + (t.hit_rate < 0 ? "null" : Format("%.17g", t.hit_rate)) +
            ",\"stall\":" + Format("%.17g", t.stall) +
            ",\"cache_bytes\":" + Format("%.0f", t.cache_bytes) + "}";
  field("trainers", "[" + list + "]");
  list.clear();
  for (const Table& t : v.tables)
    list += std::string(list.empty() ? "" : ",") + "{\"name\":" + Quoted(t.name) +
            ",\"rows\":" + Format("%.0f", t.rows) + ",\"bytes\":" + Format("%.0f", t.bytes) + "}";
  field("tables", "[" + list + "]");
  return out + "}\n";
}

int Run(int argc, char** argv) {
  std::string address, file;
  double interval = 1;
  bool once = false, json = false;
  for (int i = 1; i < argc; ++i) {
    const std::string a = argv[i];
    if (a == "--once") {
      once = true;
    } else if (a == "--json") {
      json = true;
    } else if (a == "--from" && i + 1 < argc) {
      file = argv[++i];
    } else if (a == "--interval" && i + 1 < argc) {
      char* end = nullptr;
      interval = std::strtod(argv[++i], &end);
      if (*end != 0 || !(interval >= 0.01 && interval <= 86400)) return Usage();
    } else if (!a.empty() && a[0] != '-' && address.empty()) {
      address = a;
    } else {
      return Usage();
    }
  }
  if (address.empty() == file.empty()) return Usage();
  Source source;
  source.From(file);
  if (file.empty() && !source.Attach(address)) return kFailed;
  const bool screen = !json && !once && isatty(STDOUT_FILENO);
  Sample before, now;
  View view;
  for (bool first = true;; first = false) {
    std::string text;
    if (!source.Read(&text)) return kFailed;
    if (!Parse(text, &now)) {
      std::fprintf(stderr, "frugal-top: this is no text of frugal_metrics\n");
      return kFailed;
    }
    // A text that was read before has no news. An uptime that is less than before is another
    // engine's.
    if (now("uptime_seconds") < before("uptime_seconds")) before = {};
    if (first || now("uptime_seconds") != before("uptime_seconds")) view = Between(before, now);
    before = now;
    const std::string shown = json ? Json(view) : screen ? "\033[H\033[J" + Text(view) : Text(view);
    if (std::fwrite(shown.data(), 1, shown.size(), stdout) != shown.size() ||
        std::fflush(stdout) != 0)
      return kFailed;
    if (once) return 0;
    std::this_thread::sleep_for(std::chrono::duration<double>(interval));
  }
}

}  // namespace

int main(int argc, char** argv) { return Run(argc, argv); }
