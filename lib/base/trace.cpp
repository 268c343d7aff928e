#include "base/trace.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <new>

#include "base/handles.h"
#include "base/this_thread.h"

namespace frugal {
namespace {

constexpr size_t kMostNames = 4096;

constexpr const char* kSpanNames[] = {
#define X(name, text, count) text,
    FRUGAL_SPANS(X)
#undef X
};
constexpr const char* kCountNames[] = {
#define X(name, text, count) count,
    FRUGAL_SPANS(X)
#undef X
};
constexpr const char* kWaitedNames[] = {
#define X(name, text) text,
    FRUGAL_WAITED_FOR(X)
#undef X
};
static_assert(std::size(kWaitedNames) <= 16, "TraceEvent::waited has 16 bits");

// The bytes of the UTF-8 character at `p`, or 0 if there is none.
size_t utf8_bytes(const unsigned char* p, size_t left) {
  const unsigned char c = p[0];
  const size_t n = c < 0x80                ? 1
                   : c >= 0xc2 && c < 0xe0 ? 2
                   : c >= 0xe0 && c < 0xf0 ? 3
                   : c >= 0xf0 && c < 0xf5 ? 4
                                           : 0;
  if (n == 0 || n > left) return 0;
  for (size_t i = 1; i < n; ++i)
    if ((p[i] & 0xc0) != 0x80) return 0;
  // Neither overlong, nor a surrogate, nor beyond the last character.
  if ((c == 0xe0 && p[1] < 0xa0) || (c == 0xed && p[1] >= 0xa0) || (c == 0xf0 && p[1] < 0x90) ||
      (c == 0xf4 && p[1] >= 0x90))
    return 0;
  return n;
}

// Text on its way to a file, in pieces.
class Writer {
 public:
  explicit Writer(NewFile& file) : file_(file) {}
  void put(const char* text, size_t bytes) {
    while (bytes && status_ == FRUGAL_OK) {
      const size_t n = std::min(bytes, sizeof piece_ - used_);
      std::memcpy(piece_ + used_, text, n);
      used_ += n;
      text += n;
      bytes -= n;
      if (used_ == sizeof piece_) flush();
    }
  }
  void put(const char* text) { put(text, std::strlen(text)); }
  void put(const String& text) { put(text.data(), text.size()); }
  [[gnu::format(printf, 2, 3)]] void print(const char* format, ...) {
    char line[256];
    va_list args;
    va_start(args, format);
    const int n = std::vsnprintf(line, sizeof line, format, args);
    va_end(args);
    put(line, std::min(static_cast<size_t>(n), sizeof line - 1));
  }
  Status flush() {
    if (status_ == FRUGAL_OK && used_) status_ = file_.write(piece_, used_);
    used_ = 0;
    return status_;
  }

 private:
  NewFile& file_;
  Status status_ = FRUGAL_OK;
  size_t used_ = 0;
  char piece_[16384];
};

// Microseconds with three digits after the point.
void put_time(Writer& out, const char* name, uint64_t ns) {
  out.print(",\"%s\":%llu.%03u", name, static_cast<unsigned long long>(ns / 1000),
            static_cast<unsigned>(ns % 1000));
}

}  // namespace

void append_escaped(const char* text, size_t bytes, bool json, String* out) {
  const auto* p = reinterpret_cast<const unsigned char*>(text);
  char code[8];
  for (size_t i = 0; i < bytes;) {
    const size_t n = utf8_bytes(p + i, bytes - i);
    if (n == 0) {
      std::snprintf(code, sizeof code, "\\\\x%02x", p[i]);
      *out += code;
      ++i;
      continue;
    }
    if (p[i] == '"' || p[i] == '\\') {
      *out += '\\';
      *out += static_cast<char>(p[i]);
    } else if (p[i] == '\n') {
      *out += "\\n";
    } else if (json && p[i] < 0x20) {
      std::snprintf(code, sizeof code, "\\u%04x", p[i]);
      *out += code;
    } else {
      out->append(text + i, n);
    }
    i += n;
  }
}

void trace_thread(uint32_t worker) {
  if (ThisThread* t = this_thread()) t->trace_worker = static_cast<uint16_t>(worker + 1);
}

namespace {

uint32_t number_of(ThisThread* t) {
  const uint32_t generation = process_generation();
  if (t && t->trace_generation == generation) return t->trace_number;
  const auto number = static_cast<uint32_t>(syscall(SYS_gettid));
  if (t) {
    t->trace_number = number;
    t->trace_generation = generation;
  }
  return number;
}

}  // namespace

uint32_t trace_thread_number() { return number_of(this_thread()); }

Trace::~Trace() = default;

Status Trace::start(size_t events, uint64_t* id) {
  if (events < 1 || events > kMostEvents)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "events is %zu: it must be 1..%zu", events,
                kMostEvents);
  Lock lock(mu_);
  if (kept_)
    return fail(FRUGAL_ERR_EXISTS, on() ? "a trace is being recorded already; stop it first"
                                        : "a trace that could not be written is kept; stop it with "
                                          "another path, or with NULL, first");
  auto ring = std::make_unique<Ring>();
  const size_t bytes = events * sizeof(Slot);
  FRUGAL_TRY(os_reserve(bytes, false, &ring->memory));
  FRUGAL_TRY(os_commit(ring->memory, 0, ring->memory.bytes));
  ring->slots = new (ring->memory.base) Slot[events];
  ring->size = events;
  ring->begun = now_ns();
  ring->id = ++last_id_;
  if (id) *id = ring->id;
  kept_ = std::move(ring);
  ring_.store(kept_.get());
  on_.store(true);
  return FRUGAL_OK;
}

void Trace::record(TraceEvent event) noexcept {
  event.end = now_ns();
  ThisThread* t = this_thread();
  event.thread = number_of(t);
  event.worker = t ? t->trace_worker : 0;
  keep(event);
}

void Trace::keep(const TraceEvent& event) noexcept {
  users_.fetch_add(1);
  // A span that began before this recording belongs to another one.
  if (Ring* ring = ring_.load(); ring && event.begin >= ring->begun) {
    const uint64_t n = ring->next.fetch_add(1, std::memory_order_relaxed);
    Slot& slot = ring->slots[n % ring->size];
    if (!slot.busy.exchange(true, std::memory_order_acquire)) {
      slot.event = event;
      slot.written = true;
      slot.busy.store(false, std::memory_order_release);
    }
  }
  users_.fetch_sub(1);
}

// Ends the recording: no thread writes into the ring after this.
void Trace::end() noexcept {
  on_.store(false);
  ring_.store(nullptr);
  // A thread that has read ring_ is writing 64 bytes.
  for (int spin = 0; users_.load() != 0; ++spin) {
    if (spin < 1000)
      cpu_relax();
    else
      yield_thread();
  }
}

void Trace::clear() noexcept {
  kept_.reset();
  Lock clearing(names_mu_);
  names_.clear();
}

void Trace::forget(uint64_t id) noexcept {
  Lock lock(mu_);
  if (!kept_ || kept_->id != id) return;
  end();
  clear();
}

Status Trace::stop(const char* path) {
  Lock lock(mu_);
  if (!kept_)
    return fail(FRUGAL_ERR_NOT_FOUND, "no trace was started: call frugal_trace_start first");
  end();
  Map<uint32_t, String> names;
  if (path) {
    {
      Lock copying(names_mu_);
      names = names_;
    }
    FRUGAL_TRY(write(*kept_, names, path));
  }
  clear();
  return FRUGAL_OK;
}

void Trace::name_table(uint32_t table, const String& name) noexcept {
  Lock lock(names_mu_);
  if (!on() || names_.size() >= kMostNames) return;
  try {
    String escaped;
    append_escaped(name.data(), name.size(), true, &escaped);
    names_.emplace(table, std::move(escaped));
  } catch (const std::bad_alloc&) {
  }
}

namespace {

void write_event(Writer& out, const TraceEvent& e, int pid, const Map<uint32_t, String>& names) {
  const auto kind = static_cast<size_t>(e.span);
  out.print(",\n{\"name\":\"%s\",\"cat\":\"frugal\",\"ph\":\"X\",\"pid\":%d,\"tid\":%u",
            kSpanNames[kind], pid, e.thread);
  put_time(out, "ts", e.begin);
  put_time(out, "dur", e.end - e.begin);
  out.put(",\"args\":{");
  const char* comma = "";
  auto number = [&](const char* name, uint64_t value) {
    out.print("%s\"%s\":%llu", comma, name, static_cast<unsigned long long>(value));
    comma = ",";
  };
  if (e.step != kNoTraceStep) number("step", e.step);
  if (e.rank != kNoTraceRank) number("rank", e.rank);
  if (*kCountNames[kind]) number(kCountNames[kind], e.count);
  if (e.table != kNoTraceTable) {
    out.print("%s\"table\":\"", comma);
    comma = ",";
    if (auto at = names.find(e.table); at != names.end())
      out.put(at->second);
    else
      out.print("#%u", e.table);
    out.put("\"");
  }
  if (e.span == SpanKind::kGate) {
    out.print("%s\"waited_for\":\"", comma);
    comma = "";
    for (size_t i = 0; i < std::size(kWaitedNames); ++i)
      if (e.waited >> i & 1) {
        out.print("%s%s", comma, kWaitedNames[i]);
        comma = ", ";
      }
    out.put("\"");
  }
  out.put("}}");
}

struct WrittenThread {
  uint32_t worker = 0;
  Vector<uint32_t> ranks;
};

void write_thread(Writer& out, uint32_t number, WrittenThread& thread, int pid) {
  out.print(",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%u,\"args\":{\"name\":\"",
            pid, number);
  if (thread.worker) {
    out.print("flush %u", thread.worker - 1);
  } else if (thread.ranks.empty()) {
    out.put("caller");
  } else {
    std::sort(thread.ranks.begin(), thread.ranks.end());
    const char* before = "rank ";
    for (uint32_t rank : thread.ranks) {
      out.print("%s%u", before, rank);
      before = ", ";
    }
  }
  out.put("\"}}");
}

}  // namespace

// The Chrome trace event format: an object with complete events ("ph": "X") and names of threads.
Status Trace::write(const Ring& ring, const Map<uint32_t, String>& names, const char* path) {
  NewFile file;
  FRUGAL_TRY(file.open(path));
  // On the heap, for a caller's stack may be small.
  auto writer = std::allocate_shared<Writer>(HeapAllocator<Writer>(), file);
  Writer& out = *writer;
  const int pid = static_cast<int>(getpid());
  const uint64_t next = ring.next.load(std::memory_order_relaxed);
  const uint64_t first = next > ring.size ? next - ring.size : 0;
  uint64_t written = 0;
  out.print(
      "{\"traceEvents\":[\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":"
      "\"frugal %d\"}}",
      pid, pid);
  Map<uint32_t, WrittenThread> threads;
  for (uint64_t n = first; n < next; ++n) {
    const Slot& slot = ring.slots[n % ring.size];
    if (!slot.written) continue;
    ++written;
    const TraceEvent& e = slot.event;
    WrittenThread& thread = threads[e.thread];
    thread.worker = e.worker;
    // The ranks whose calls the thread made; work in the background is for any rank.
    if (!e.worker && e.rank != kNoTraceRank && e.span != SpanKind::kResolve &&
        e.span != SpanKind::kLink && e.span != SpanKind::kPlan && thread.ranks.size() < 8 &&
        std::find(thread.ranks.begin(), thread.ranks.end(), e.rank) == thread.ranks.end())
      thread.ranks.push_back(e.rank);
    write_event(out, e, pid, names);
  }
  for (auto& [number, thread] : threads) write_thread(out, number, thread, pid);
  out.print(
      "\n],\n\"displayTimeUnit\":\"ns\",\"otherData\":{\"clock\":\"CLOCK_MONOTONIC\",\"dropped\":%"
      "llu}}\n",
      static_cast<unsigned long long>(next - written));
  FRUGAL_TRY(out.flush());
  return file.publish();
}

}  // namespace frugal
