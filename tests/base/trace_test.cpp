// A trace is JSON with each rank's steps, rows and waits; starts and stops during training; each
// failure; each metric.
//
// The program is linked with the library's objects, for the hooks that make memory and file calls
// fail.
#include <dirent.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/heap.h"
#include "base/os.h"
#include "frugal.h"
#include "support/engine.h"
#include "support/ok.h"

namespace {

constexpr int64_t kWait = FRUGAL_TIMEOUT_DEFAULT;

int32_t SystemCode() {
  frugal_error error;
  frugal_last_error(&error);
  return error.system_code;
}

// --- JSON, as strict as its definition ---

struct Json {
  enum Kind { kNull, kNumber, kString, kArray, kObject } kind = kNull;
  double number = 0;
  std::string text;  // of a number its digits
  std::vector<Json> items;
  std::map<std::string, Json> fields;

  const Json& operator[](const std::string& name) const {
    static const Json none;
    const auto at = fields.find(name);
    return at == fields.end() ? none : at->second;
  }
  bool has(const std::string& name) const { return fields.count(name) != 0; }
  uint64_t whole() const { return std::strtoull(text.c_str(), nullptr, 10); }
};

class JsonReader {
 public:
  explicit JsonReader(const std::string& text) : p_(text.c_str()), end_(p_ + text.size()) {}
  bool Read(Json* out) { return Value(out) && (Space(), p_ == end_); }

 private:
  void Space() {
    while (p_ != end_ && std::strchr(" \t\r\n", *p_) && *p_) ++p_;
  }
  bool Eat(char c) {
    Space();
    if (p_ == end_ || *p_ != c) return false;
    ++p_;
    return true;
  }
  bool Digits() {
    const char* from = p_;
    while (p_ != end_ && std::isdigit(static_cast<unsigned char>(*p_))) ++p_;
    return p_ != from;
  }
  bool String(std::string* out) {
    if (!Eat('"')) return false;
    while (p_ != end_ && *p_ != '"') {
      if (static_cast<unsigned char>(*p_) < 0x20) return false;
      if (*p_ != '\\') {
        *out += *p_++;
        continue;
      }
      if (++p_ == end_) return false;
      const char c = *p_++;
      if (c == 'n') {
        *out += '\n';
      } else if (c == 'u') {
        if (end_ - p_ < 4) return false;
        *out += static_cast<char>(std::strtoul(std::string(p_, 4).c_str(), nullptr, 16));
        p_ += 4;
      } else if (c == '"' || c == '\\' || c == '/') {
        *out += c;
      } else {
        return false;
      }
    }
    if (p_ == end_) return false;
    ++p_;
    return true;
  }
  bool Value(Json* out) {
    Space();
    if (p_ == end_) return false;
    if (*p_ == '"') {
      out->kind = Json::kString;
      return String(&out->text);
    }
    if (*p_ == '{') {
      out->kind = Json::kObject;
      ++p_;
      if (Eat('}')) return true;
      do {
        std::string name;
        Json value;
        if (!String(&name) || !Eat(':') || !Value(&value)) return false;
        if (!out->fields.emplace(name, std::move(value)).second) return false;
      } while (Eat(','));
      return Eat('}');
    }
    if (*p_ == '[') {
      out->kind = Json::kArray;
      ++p_;
      if (Eat(']')) return true;
      do {
        out->items.emplace_back();
        if (!Value(&out->items.back())) return false;
      } while (Eat(','));
      return Eat(']');
    }
    out->kind = Json::kNumber;
    const char* from = p_;
    if (!Digits()) return false;
    if (p_ != end_ && *p_ == '.') {
      ++p_;
      if (!Digits()) return false;
    }
    out->text.assign(from, p_);
    out->number = std::strtod(out->text.c_str(), nullptr);
    return true;
  }

  const char* p_;
  const char* end_;
};

// --- Files ---

class Folder {
 public:
  Folder() {
    char name[] = "/tmp/frugal_trace_XXXXXX";
    path_ = mkdtemp(name);
  }
  ~Folder() {
    for (const std::string& name : Files()) unlink((path_ + "/" + name).c_str());
    rmdir(path_.c_str());
  }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  std::set<std::string> Files() const {
    std::set<std::string> files;
    DIR* folder = opendir(path_.c_str());
    while (dirent* entry = readdir(folder))
      if (entry->d_name[0] != '.') files.insert(entry->d_name);
    closedir(folder);
    return files;
  }

 private:
  std::string path_;
};

std::string Content(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

struct Trace {
  explicit Trace(const std::string& path) {
    EXPECT_TRUE(JsonReader(Content(path)).Read(&json)) << Content(path).substr(0, 2000);
    for (const Json& e : json["traceEvents"].items) {
      EXPECT_EQ(e["pid"].whole(), static_cast<uint64_t>(getpid()));
      if (e["ph"].text == "M") {
        if (e["name"].text == "thread_name") threads[e["tid"].whole()] = e["args"]["name"].text;
        continue;
      }
      EXPECT_EQ(e["ph"].text, "X");
      EXPECT_TRUE(e.has("ts") && e.has("dur") && e.has("tid"));
      spans[e["name"].text].push_back(&e);
      ++count;
    }
    for (auto& [name, list] : spans)
      for (const Json* e : list) EXPECT_TRUE(threads.count((*e)["tid"].whole())) << name;
  }
  uint64_t dropped() const { return json["otherData"]["dropped"].whole(); }
  Json json;
  std::map<uint64_t, std::string> threads;
  std::map<std::string, std::vector<const Json*>> spans;
  size_t count = 0;
};

// --- A small training ---

struct Engine : frugal_test::Engine {
  using frugal_test::Engine::Engine;
  frugal_table* Table(const char* name, int32_t key_space = FRUGAL_DENSE, uint64_t rows = 4000) {
    return frugal_test::Engine::Table(name, key_space, rows, 8);
  }
};

constexpr uint64_t kKeys = 300;

void Declare(frugal_trainer* trainer, frugal_table* table, uint64_t step, frugal_batch** batch) {
  std::vector<uint64_t> keys(kKeys);
  for (uint64_t i = 0; i < kKeys; ++i) keys[i] = (step * 37 + i * 11) % 4000;
  frugal_op op = FRUGAL_OP_INIT;
  op.table = table;
  op.keys = keys.data();
  op.count = keys.size();
  EXPECT_OK(frugal_prefetch(trainer, step, &op, 1, batch));
}

// Steps [from, to) of a rank, declared two steps ahead.
void Train(frugal_trainer* trainer, frugal_table* table, uint64_t from, uint64_t to) {
  std::map<uint64_t, frugal_batch*> batches;
  std::vector<float> rows(kKeys * 8);
  const std::vector<float> grads(kKeys * 8, 0.5f);
  for (uint64_t s = from; s < to; ++s) {
    for (uint64_t d = s == from ? s : s + 2; d <= s + 2 && d < to; ++d)
      Declare(trainer, table, d, &batches[d]);
    ASSERT_OK(frugal_step_begin(trainer, s, kWait));
    frugal_op op = FRUGAL_OP_INIT;
    op.batch = batches[s];
    op.table = table;
    op.rows_out = rows.data();
    ASSERT_OK(frugal_lookup(trainer, &op, 1));
    op.rows_out = nullptr;
    op.grads = grads.data();
    ASSERT_OK(frugal_push_grad(trainer, &op, 1));
    ASSERT_OK(frugal_step_end(trainer, s, 0));
  }
}

TEST(Trace, HasTheSpansOfATraining) {
  const uint64_t steps = 20;
  for (int32_t mode : {FRUGAL_FLUSH_AT_ONCE, FRUGAL_FLUSH_DEFERRED})
    for (uint32_t flush_threads : {0u, 2u}) {
      SCOPED_TRACE(mode * 10 + static_cast<int>(flush_threads));
      Folder folder;
      Engine engine([&](frugal_config* c) {
        c->world_size = 2;
        c->flush_mode = mode;
        c->flush_threads = flush_threads;
      });
      frugal_table* table = engine.Table("users \"1\"\n\\ \xff\xc3\xa4");
      frugal_trainer* trainers[] = {engine.Trainer(0, 0.5), engine.Trainer(1, 0.5)};
      ASSERT_OK(frugal_trace_start(engine.handle, 100'000));
      std::thread other([&] { Train(trainers[1], table, 5, 5 + steps); });
      Train(trainers[0], table, 5, 5 + steps);
      other.join();
      ASSERT_OK(frugal_flush(engine.handle, kWait));
      ASSERT_OK(frugal_trace_stop(engine.handle, (folder / "trace.json").c_str()));

      Trace trace(folder / "trace.json");
      EXPECT_EQ(trace.json["otherData"]["clock"].text, "CLOCK_MONOTONIC");
      EXPECT_EQ(trace.dropped(), 0u);
      // Each call of each rank, with its step.
      for (const char* name :
           {"prefetch", "step_begin", "gate", "refresh", "lookup", "push", "step_end"}) {
        std::set<std::pair<uint64_t, uint64_t>> seen;
        for (const Json* e : trace.spans[name])
          seen.emplace((*e)["args"]["rank"].whole(), (*e)["args"]["step"].whole());
        EXPECT_EQ(seen.size(), 2 * steps) << name;
        EXPECT_TRUE(seen.count({1, 5 + steps - 1})) << name;
      }
      for (const char* name : {"prefetch", "lookup", "push", "resolve"})
        for (const Json* e : trace.spans[name])
          EXPECT_EQ((*e)["args"]["keys"].whole(), kKeys) << name;
      // Each flush thread may have been about to end one.
      for (const char* name : {"resolve", "link"}) {
        EXPECT_LE(trace.spans[name].size(), 2 * steps) << name;
        EXPECT_GE(trace.spans[name].size() + flush_threads, 2 * steps) << name;
      }
      EXPECT_EQ(trace.spans["commit"].size(), steps);
      for (const Json* e : trace.spans["commit"])
        EXPECT_EQ((*e)["args"]["rows"].whole(), 2 * kKeys);
      // Both ranks push the same rows: each is written once a step, in chunks or from the queue.
      std::map<uint64_t, uint64_t> applied;
      for (const Json* e : trace.spans["apply"]) {
        applied[(*e)["args"]["step"].whole()] += (*e)["args"]["rows"].whole();
        EXPECT_EQ((*e)["args"]["table"].text, "users \"1\"\n\\ \\xff\xc3\xa4");
      }
      EXPECT_EQ(applied.size(), steps);
      for (auto& [step, rows] : applied) EXPECT_EQ(rows, kKeys) << step;
      uint64_t flushed = 0;
      for (const Json* e : trace.spans["flush"]) flushed += (*e)["args"]["rows"].whole();
      EXPECT_LE(flushed, steps * kKeys);
      if (mode == FRUGAL_FLUSH_DEFERRED) {
        EXPECT_GT(flushed, 0u);
      }
      // A gate lies within its step_begin, on the same thread.
      for (const Json* gate : trace.spans["gate"]) {
        bool inside = false;
        for (const Json* begin : trace.spans["step_begin"])
          inside |= (*begin)["tid"].text == (*gate)["tid"].text &&
                    (*begin)["ts"].number <= (*gate)["ts"].number &&
                    (*begin)["ts"].number + (*begin)["dur"].number >=
                        (*gate)["ts"].number + (*gate)["dur"].number;
        EXPECT_TRUE(inside);
        EXPECT_TRUE((*gate)["args"].has("waited_for"));
      }
      std::set<std::string> names;
      for (auto& [tid, name] : trace.threads) names.insert(name);
      EXPECT_TRUE(names.count("rank 0") && names.count("rank 1"));
      EXPECT_EQ(names.count("flush 0") + names.count("flush 1") > 0, flush_threads > 0);
      EXPECT_EQ(trace.threads.at(static_cast<uint64_t>(gettid())), "rank 0");
    }
}

TEST(Trace, TellsWhatAGateWaitedFor) {
  Folder folder;
  Engine engine([](frugal_config* c) { c->world_size = 2; });
  frugal_table* table = engine.Table("t");
  frugal_trainer* trainers[] = {engine.Trainer(0), engine.Trainer(1)};
  ASSERT_OK(frugal_trace_start(engine.handle, 1000));
  Train(trainers[0], table, 0, 1);
  EXPECT_EQ(frugal_step_begin(trainers[0], 1, 0), FRUGAL_ERR_TIMEOUT);
  ASSERT_OK(frugal_trace_stop(engine.handle, (folder / "t").c_str()));
  Trace trace(folder / "t");
  bool told = false;
  for (const Json* gate : trace.spans["gate"])
    told |= (*gate)["args"]["step"].whole() == 1 && (*gate)["args"]["waited_for"].text == "ranks";
  EXPECT_TRUE(told);
}

TEST(Trace, TheNewestEventsAreKept) {
  Folder folder;
  Engine engine([](frugal_config* c) { c->flush_threads = 0; });
  frugal_table* table = engine.Table("t");
  frugal_trainer* trainer = engine.Trainer(0);
  ASSERT_OK(frugal_trace_start(engine.handle, 64));
  Train(trainer, table, 0, 100);
  ASSERT_OK(frugal_trace_stop(engine.handle, (folder / "t").c_str()));
  Trace trace(folder / "t");
  EXPECT_EQ(trace.count, 64u);
  EXPECT_GT(trace.dropped(), 500u);
  ASSERT_FALSE(trace.spans["step_end"].empty());
  EXPECT_EQ((*trace.spans["step_end"].back())["args"]["step"].whole(), 99u);
  for (const Json* e : trace.spans["step_end"]) EXPECT_GT((*e)["args"]["step"].whole(), 80u);

  // Another trace knows nothing of the one before.
  ASSERT_OK(frugal_trace_start(engine.handle, 1));
  ASSERT_OK(frugal_trace_stop(engine.handle, (folder / "t").c_str()));
  EXPECT_EQ(Trace(folder / "t").count, 0u);
}

TEST(Trace, KeepsNamesOfTablesThatCameAndWent) {
  Folder folder;
  Engine engine;
  frugal_trainer* trainer = engine.Trainer(0);
  frugal_table* before = engine.Table("before");
  ASSERT_OK(frugal_trace_start(engine.handle, 10'000));
  frugal_table* during = engine.Table("during");
  Train(trainer, before, 0, 1);
  Train(trainer, during, 1, 2);
  ASSERT_OK(frugal_table_drop(before));
  ASSERT_OK(frugal_table_drop(during));
  ASSERT_OK(frugal_trace_stop(engine.handle, (folder / "t").c_str()));
  std::set<std::string> names;
  Trace trace(folder / "t");
  for (const Json* e : trace.spans["resolve"]) names.insert((*e)["args"]["table"].text);
  EXPECT_EQ(names, (std::set<std::string>{"before", "during"}));
}

TEST(Trace, BadInput) {
  Folder folder;
  Engine engine;
  EXPECT_EQ(frugal_trace_start(nullptr, 10), FRUGAL_ERR_BAD_HANDLE);
  EXPECT_EQ(frugal_trace_stop(nullptr, nullptr), FRUGAL_ERR_BAD_HANDLE);
  EXPECT_EQ(frugal_trace_stop(engine.handle, nullptr), FRUGAL_ERR_NOT_FOUND);
  EXPECT_EQ(frugal_trace_start(engine.handle, 0), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(frugal_trace_start(engine.handle, SIZE_MAX), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(frugal_trace_start(engine.handle, (size_t{1} << 26) + 1), FRUGAL_ERR_INVALID_ARGUMENT);
  ASSERT_OK(frugal_trace_start(engine.handle, 10));
  EXPECT_EQ(frugal_trace_start(engine.handle, 10), FRUGAL_ERR_EXISTS);
  // What cannot be written is kept, and can be written elsewhere.
  EXPECT_EQ(frugal_trace_stop(engine.handle, (folder / "none/t").c_str()),
            FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(SystemCode(), ENOENT);
  EXPECT_EQ(frugal_trace_start(engine.handle, 10), FRUGAL_ERR_EXISTS);
  ASSERT_EQ(mkdir((folder / "place").c_str(), 0700), 0);
  EXPECT_EQ(frugal_trace_stop(engine.handle, (folder / "place").c_str()),
            FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(SystemCode(), EISDIR);
  rmdir((folder / "place").c_str());
  EXPECT_EQ(frugal_trace_stop(engine.handle, ""), FRUGAL_ERR_INVALID_ARGUMENT);
  // A limit of file sizes would send a deadly signal.
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit limit{16, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  const int32_t limited = frugal_trace_stop(engine.handle, (folder / "t").c_str());
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(limited, FRUGAL_ERR_NO_SPACE);
  EXPECT_EQ(SystemCode(), EFBIG);
  EXPECT_TRUE(folder.Files().empty());
  // It replaces what is there, and is the owner's alone.
  std::ofstream(folder / "t") << "before";
  ASSERT_OK(frugal_trace_stop(engine.handle, (folder / "t").c_str()));
  Trace trace(folder / "t");
  struct stat info;
  ASSERT_EQ(stat((folder / "t").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_EQ(folder.Files(), (std::set<std::string>{"t"}));
  EXPECT_EQ(frugal_trace_stop(engine.handle, (folder / "t").c_str()), FRUGAL_ERR_NOT_FOUND);
  // Closing an engine that records forgets it.
  ASSERT_OK(frugal_trace_start(engine.handle, 10));
}

// Each memory and file call of a start, a stop and of metrics fails in turn.
TEST(Trace, EveryFailureIsAStatus) {
  Folder folder;
  for (auto arm : {frugal::os_test_fail_after, frugal::heap_test_fail_after}) {
    Engine engine([](frugal_config* c) { c->flush_threads = 0; });
    frugal_table* table = engine.Table("t");
    frugal_trainer* trainer = engine.Trainer(0);
    std::vector<char> text(100'000);
    size_t size = 0;
    uint64_t step = 0;
    int started = 0, stopped = 0, told = 0;
    for (int64_t n = 1;; ++n) {
      ASSERT_LT(n, 200);
      arm(n);
      int32_t status = frugal_trace_start(engine.handle, 1000);
      const bool start_fired = arm(0) <= 0;
      if (status != FRUGAL_OK) {
        EXPECT_EQ(status, FRUGAL_ERR_OUT_OF_MEMORY) << LastMessage();
        EXPECT_TRUE(start_fired);
        ++started;
        EXPECT_EQ(frugal_trace_stop(engine.handle, nullptr), FRUGAL_ERR_NOT_FOUND);
        ASSERT_OK(frugal_trace_start(engine.handle, 1000));
      }
      Train(trainer, table, step, step + 3);
      step += 3;
      const std::string path = folder / "t";
      arm(n);
      status = frugal_trace_stop(engine.handle, path.c_str());
      const bool stop_fired = arm(0) <= 0;
      if (status != FRUGAL_OK) {
        EXPECT_TRUE(status == FRUGAL_ERR_OUT_OF_MEMORY || status == FRUGAL_ERR_INVALID_ARGUMENT ||
                    status == FRUGAL_ERR_NO_SPACE || status == FRUGAL_ERR_IO)
            << LastMessage();
        EXPECT_TRUE(stop_fired);
        EXPECT_TRUE(folder.Files().empty());
        ++stopped;
        ASSERT_OK(frugal_trace_stop(engine.handle, path.c_str()));
      }
      EXPECT_GT(Trace(path).spans["lookup"].size(), 0u);
      unlink(path.c_str());
      arm(n);
      status = frugal_metrics(engine.handle, text.data(), text.size(), &size);
      const bool metrics_fired = arm(0) <= 0;
      if (status != FRUGAL_OK) {
        EXPECT_EQ(status, FRUGAL_ERR_OUT_OF_MEMORY);
        EXPECT_TRUE(metrics_fired);
        ++told;
      }
      if (!start_fired && !stop_fired && !metrics_fired) break;
    }
    EXPECT_GE(started, 1);
    EXPECT_GE(stopped, 3);
    if (arm == frugal::heap_test_fail_after) {
      EXPECT_GE(told, 3);
    }
  }
}

// Starts and stops from two threads while three ranks train and flush threads write.
TEST(Trace, StartsAndStopsDuringTraining) {
  Folder folder;
  for (int32_t mode : {FRUGAL_FLUSH_AT_ONCE, FRUGAL_FLUSH_DEFERRED}) {
    Engine engine([&](frugal_config* c) {
      c->world_size = 3;
      c->flush_threads = 2;
      c->flush_mode = mode;
    });
    frugal_table* table = engine.Table("t");
    std::vector<std::thread> threads;
    std::atomic<int> training{3};
    for (uint32_t r = 0; r < 3; ++r)
      threads.emplace_back([&, r] {
        Train(engine.Trainer(r, 0.3), table, 0, 150);
        --training;
      });
    std::atomic<int> written{0};
    for (int w = 0; w < 2; ++w)
      threads.emplace_back([&, w] {
        const std::string path = folder / std::to_string(w);
        std::vector<char> text(100'000);
        for (int i = 0; training.load() || i < 3; ++i) {
          const int32_t started = frugal_trace_start(engine.handle, i % 2 ? 5 : 5000);
          EXPECT_TRUE(started == FRUGAL_OK || started == FRUGAL_ERR_EXISTS);
          size_t size = 0;
          EXPECT_OK(frugal_metrics(engine.handle, text.data(), text.size(), &size));
          const int32_t stopped = frugal_trace_stop(engine.handle, i % 5 ? path.c_str() : nullptr);
          EXPECT_TRUE(stopped == FRUGAL_OK || stopped == FRUGAL_ERR_NOT_FOUND) << LastMessage();
          if (stopped == FRUGAL_OK && i % 5) {
            Trace trace(path);
            EXPECT_LE(trace.count, 5000u);
            ++written;
          }
        }
      });
    for (std::thread& t : threads) t.join();
    EXPECT_GT(written.load(), 0);
    (void)frugal_trace_stop(engine.handle, nullptr);
  }
}

// --- Metrics ---

std::string Metrics(frugal_engine* engine) {
  size_t size = 0;
  EXPECT_EQ(frugal_metrics(engine, nullptr, 0, &size), FRUGAL_ERR_OVERFLOW);
  std::vector<char> text(size + 1000, 'x');
  EXPECT_OK(frugal_metrics(engine, text.data(), text.size(), &size));
  EXPECT_EQ(std::strlen(text.data()) + 1, size);
  EXPECT_EQ(text[size], 'x');
  return text.data();
}

// Each line by the exposition format; value by name and labels as they are written.
std::map<std::string, std::string> Samples(const std::string& text,
                                           std::map<std::string, std::string>* types = nullptr) {
  std::map<std::string, std::string> samples;
  std::string family, help_of, type;
  std::set<std::string> families;
  const auto name_ok = [](const std::string& name) {
    for (char c : name)
      if (!std::islower(static_cast<unsigned char>(c)) && c != '_') return false;
    return name.rfind("frugal_", 0) == 0;
  };
  EXPECT_EQ(text.back(), '\n');
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    SCOPED_TRACE(line);
    if (line.rfind("# HELP ", 0) == 0) {
      const size_t space = line.find(' ', 7);
      help_of = line.substr(7, space - 7);
      EXPECT_TRUE(name_ok(help_of));
      EXPECT_GT(line.size() - space, 5u);
      EXPECT_EQ(line.find('\\'), std::string::npos);
      EXPECT_TRUE(families.insert(help_of).second);
      continue;
    }
    if (line.rfind("# TYPE ", 0) == 0) {
      const size_t space = line.find(' ', 7);
      family = line.substr(7, space - 7);
      type = line.substr(space + 1);
      EXPECT_EQ(family, help_of);
      EXPECT_TRUE(type == "counter" || type == "gauge");
      const bool total = family.size() > 6 && family.compare(family.size() - 6, 6, "_total") == 0;
      EXPECT_EQ(total, type == "counter");
      if (types) (*types)[family] = type;
      continue;
    }
    // NAME[{label="text"}] VALUE
    const size_t space = line.rfind(' ');
    const std::string sample = line.substr(0, space), value = line.substr(space + 1);
    EXPECT_EQ(sample.substr(0, sample.find('{')), family);
    char* end = nullptr;
    std::strtod(value.c_str(), &end);
    EXPECT_TRUE(!value.empty() && *end == 0);
    if (const size_t brace = sample.find('{'); brace != std::string::npos) {
      const size_t quote = sample.find("=\"", brace);
      EXPECT_EQ(sample.substr(sample.size() - 2), "\"}");
      for (size_t i = quote + 2; i < sample.size() - 2; ++i) {
        EXPECT_NE(sample[i], '"');
        if (sample[i] == '\\') {
          ++i;
          EXPECT_TRUE(sample[i] == '\\' || sample[i] == '"' || sample[i] == 'n');
        }
      }
    }
    EXPECT_TRUE(samples.emplace(sample, value).second) << "twice";
  }
  return samples;
}

TEST(Metrics, EveryLineIsRight) {
  Engine engine([](frugal_config* c) {
    c->world_size = 2;
    c->flush_mode = FRUGAL_FLUSH_DEFERRED;
  });
  auto before = Samples(Metrics(engine.handle));
  EXPECT_EQ(before.count("frugal_committed_step"), 0u);
  EXPECT_EQ(before["frugal_health"], "0");
  EXPECT_EQ(before["frugal_world_size"], "2");
  EXPECT_EQ(before["frugal_flush_threads"], "1");

  frugal_table* table = engine.Table("users");
  frugal_table* odd = engine.Table("a \"b\"\n\\c \xff", FRUGAL_HASHED);
  frugal_trainer* trainers[] = {engine.Trainer(0), engine.Trainer(1)};
  auto joined = Samples(Metrics(engine.handle));
  EXPECT_EQ(joined.count("frugal_trainer_step{rank=\"0\"}"), 0u);
  EXPECT_EQ(joined["frugal_trainer_in_step{rank=\"1\"}"], "0");
  std::thread other([&] { Train(trainers[1], table, 7, 10); });
  Train(trainers[0], table, 7, 10);
  other.join();
  ASSERT_OK(frugal_step_begin(trainers[1], 10, kWait));
  ASSERT_OK(frugal_flush(engine.handle, kWait));

  std::map<std::string, std::string> types;
  auto samples = Samples(Metrics(engine.handle), &types);
  frugal_stats stats;
  stats.struct_size = sizeof(stats);
  ASSERT_OK(frugal_get_stats(engine.handle, &stats));
  EXPECT_EQ(samples["frugal_steps_committed_total"], "3");
  EXPECT_EQ(samples["frugal_keys_looked_up_total"], std::to_string(2 * 3 * kKeys));
  EXPECT_EQ(samples["frugal_rows_updated_total"], std::to_string(stats.rows_updated));
  EXPECT_EQ(samples["frugal_pending_rows"], "0");
  EXPECT_EQ(samples["frugal_pending_bytes_peak"], std::to_string(stats.pending_bytes_peak));
  EXPECT_EQ(types["frugal_pending_bytes"], "gauge");
  char seconds[64];
  std::snprintf(seconds, sizeof(seconds), "%llu.%09llu",
                static_cast<unsigned long long>(stats.lookup_ns / 1000000000),
                static_cast<unsigned long long>(stats.lookup_ns % 1000000000));
  EXPECT_EQ(samples["frugal_lookup_seconds_total"], seconds);
  EXPECT_EQ(samples["frugal_committed_step"], "9");
  EXPECT_EQ(samples["frugal_table_rows{table=\"users\"}"], "4000");
  EXPECT_EQ(samples["frugal_table_rows{table=\"a \\\"b\\\"\\n\\\\c \\\\xff\"}"], "0");
  frugal_table_info info;
  info.struct_size = sizeof(info);
  ASSERT_OK(frugal_table_describe(table, &info));
  EXPECT_EQ(samples["frugal_table_bytes{table=\"users\"}"], std::to_string(info.memory_bytes));
  EXPECT_EQ(samples["frugal_trainer_step{rank=\"0\"}"], "9");
  EXPECT_EQ(samples["frugal_trainer_in_step{rank=\"0\"}"], "0");
  EXPECT_EQ(samples["frugal_trainer_step{rank=\"1\"}"], "10");
  EXPECT_EQ(samples["frugal_trainer_in_step{rank=\"1\"}"], "1");
  for (const char* rank : {"0", "1"}) {
    const std::string of = std::string("{rank=\"") + rank + "\"}";
    EXPECT_EQ(samples["frugal_trainer_keys_looked_up_total" + of], std::to_string(3 * kKeys));
    EXPECT_EQ(samples["frugal_trainer_keys_pushed_total" + of], std::to_string(3 * kKeys));
    EXPECT_EQ(samples["frugal_trainer_host_cache_bytes" + of], "0");
    EXPECT_EQ(samples["frugal_trainer_hbm_cache_bytes" + of], "0");
    EXPECT_EQ(samples["frugal_trainer_cache_hits_total" + of], "0");
  }
  const double waited = std::stod(samples["frugal_trainer_gate_wait_seconds_total{rank=\"0\"}"]) +
                        std::stod(samples["frugal_trainer_gate_wait_seconds_total{rank=\"1\"}"]);
  EXPECT_NEAR(waited, std::stod(samples["frugal_gate_wait_seconds_total"]), waited / 100 + 1e-4);
  EXPECT_EQ(types["frugal_trainer_gate_wait_seconds_total"], "counter");
  // All of frugal_stats, and sixteen families more.
  EXPECT_EQ(types.size(), (sizeof(frugal_stats) - sizeof(size_t)) / sizeof(uint64_t) + 16);
  EXPECT_GT(std::stod(samples["frugal_uptime_seconds"]),
            std::stod(before["frugal_uptime_seconds"]));
  EXPECT_EQ(frugal_table_drop(odd), FRUGAL_ERR_BUSY);
}

TEST(Metrics, CachesOfTrainers) {
  Engine engine([](frugal_config* c) { c->world_size = 2; });
  frugal_table* table = engine.Table("users");
  frugal_table* other = engine.Table("other");
  frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
  config.cache_ratio = 0.5;
  frugal_trainer* trainers[2] = {};
  ASSERT_OK(frugal_trainer_create(engine.handle, &config, &trainers[0]));
  config.rank = 1;
  config.cache_ratio = 0;
  ASSERT_OK(frugal_trainer_create(engine.handle, &config, &trainers[1]));
  for (frugal_table* of : {table, other}) {
    const uint64_t first = of == table ? 0 : 5;
    std::thread second([&] { Train(trainers[1], of, first, first + 5); });
    Train(trainers[0], of, first, first + 5);
    second.join();
  }
  auto samples = Samples(Metrics(engine.handle));
  const auto bytes = [&] {
    return std::stod(samples["frugal_trainer_host_cache_bytes{rank=\"0\"}"]);
  };
  const double both = bytes();
  EXPECT_GT(both, 2 * 2000 * sizeof(float));
  EXPECT_EQ(samples["frugal_trainer_host_cache_bytes{rank=\"1\"}"], "0");
  EXPECT_EQ(samples["frugal_trainer_hbm_cache_bytes{rank=\"0\"}"], "0");
  EXPECT_EQ(samples["frugal_trainer_cache_hits_total{rank=\"0\"}"],
            samples["frugal_cache_hits_total"]);
  EXPECT_EQ(samples["frugal_trainer_cache_misses_total{rank=\"0\"}"],
            samples["frugal_cache_misses_total"]);
  EXPECT_GT(std::stod(samples["frugal_cache_misses_total"]), 0);
  ASSERT_OK(frugal_table_drop(other));
  samples = Samples(Metrics(engine.handle));
  EXPECT_EQ(bytes(), both / 2);
}

TEST(Metrics, TheSizeIsTold) {
  Engine engine;
  size_t needed = 0, size = 0;
  EXPECT_EQ(frugal_metrics(engine.handle, nullptr, 0, &needed), FRUGAL_ERR_OVERFLOW);
  std::vector<char> text(needed, 'x');
  EXPECT_EQ(frugal_metrics(engine.handle, text.data(), needed - 1, &size), FRUGAL_ERR_OVERFLOW);
  EXPECT_EQ(size, needed);
  EXPECT_EQ(text[0], 'x');
  EXPECT_OK(frugal_metrics(engine.handle, text.data(), needed, &size));
  EXPECT_EQ(size, needed);
  EXPECT_EQ(text.back(), 0);
  EXPECT_EQ(frugal_metrics(engine.handle, nullptr, 10, &size), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(frugal_metrics(engine.handle, text.data(), needed, nullptr),
            FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(frugal_metrics(nullptr, text.data(), needed, &size), FRUGAL_ERR_BAD_HANDLE);
}

}  // namespace
