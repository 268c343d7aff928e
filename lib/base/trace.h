// Spans of the engine's work in a ring, written as a Chrome trace on request.
//
// A span costs one relaxed load while nothing is recorded. Else its end takes a slot of the ring by
// one atomic addition and writes 64 bytes there. That needs no lock, no allocation and no system
// call (but for the number of a thread, once). New spans replace the oldest; the file has the
// number of spans that are missing.
//
// A recording may start and stop at any time, from any thread. A thread that records counts itself
// in users_ before it reads ring_. A thread that stops clears ring_ first and then waits until
// users_ is 0. So no thread writes into a ring that is being read, or is gone. A slot has a lock of
// its own, which is only tried. A thread that was delayed for a whole round of the ring loses its
// span, and no thread waits for it.
//
// Times are CLOCK_MONOTONIC, so that files of several processes of one machine can be merged.
#pragma once
#include <atomic>
#include <memory>
#include <new>

#include "base/os.h"
#include "base/status.h"
#include "base/sync.h"

namespace frugal {

// The kinds of spans: identifier, name in the file, what the count counts.
// clang-format off
#define FRUGAL_SPANS(X)                                                                            \
  X(kPrefetch, "prefetch", "keys") X(kResolve, "resolve", "keys") X(kLink, "link", "rows")         \
  X(kPrepare, "prepare", "rows") X(kPlan, "plan", "") X(kWarm, "warm", "rows")                     \
  X(kStepBegin, "step_begin", "") X(kGate, "gate", "") X(kRefresh, "refresh", "")                  \
  X(kLookup, "lookup", "keys") X(kPush, "push", "keys") X(kStepEnd, "step_end", "")                \
  X(kCommit, "commit", "rows") X(kFlush, "flush", "rows") X(kApply, "apply", "rows")               \
  X(kHelp, "help", "chunks") X(kAbort, "abort", "") X(kCheckpoint, "checkpoint", "rows")
// clang-format on

enum class SpanKind : uint8_t {
#define X(name, text, count) name,
  FRUGAL_SPANS(X)
#undef X
};

// What a gate can wait for; its span has a bit for each.
// clang-format off
#define FRUGAL_WAITED_FOR(X)                                                                       \
  X(kOutside, "operation outside steps") X(kAborting, "abort") X(kRanks, "ranks")                  \
  X(kJobs, "apply") X(kDeclared, "declarations") X(kAllPending, "all pending rows")                \
  X(kPending, "pending rows of the step") X(kLoading, "rows that are loading")            \
  X(kCopies, "copies of rows for a checkpoint")
// clang-format on

enum class WaitedFor : uint8_t {
#define X(name, text) name,
  FRUGAL_WAITED_FOR(X)
#undef X
};
constexpr uint32_t waited_for(WaitedFor what) { return 1u << static_cast<uint32_t>(what); }

constexpr uint64_t kNoTraceStep = UINT64_MAX;
constexpr uint32_t kNoTraceRank = UINT32_MAX;
constexpr uint32_t kNoTraceTable = UINT32_MAX;

struct TraceEvent {
  uint64_t begin = 0, end = 0;  // now_ns()
  uint64_t step = kNoTraceStep;
  uint64_t count = 0;  // of what FRUGAL_SPANS says
  uint32_t rank = kNoTraceRank;
  uint32_t table = kNoTraceTable;
  uint32_t thread = 0;  // the system's number
  uint16_t worker = 0;  // 1 + the number of a flush thread; 0: another thread
  uint16_t waited = 0;  // bits of WaitedFor
  SpanKind span = SpanKind::kPrefetch;
};

// Numbers the calling thread as a flush thread of an engine, from 0 on.
void trace_thread(uint32_t worker);
uint32_t trace_thread_number();

class Trace {
 public:
  static constexpr size_t kMostEvents = size_t{1} << 26;

  Trace() = default;
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  bool on() const { return on_.load(std::memory_order_relaxed); }
  void record(TraceEvent event) noexcept;       // an event that ends now, in this thread
  void keep(const TraceEvent& event) noexcept;  // a complete event, of another process

  // EXISTS: there is one already. name_table() gives tables their names. `id`: of this recording.
  Status start(size_t events, uint64_t* id = nullptr);
  // Ends the recording, and writes it to a file; null: drops it. A recording that could not be
  // written is kept for another try. NOT_FOUND: nothing was started.
  Status stop(const char* path);
  // Ends and drops the recording with that id, if it still exists.
  void forget(uint64_t id) noexcept;
  // A table's name in the file. Without memory for it, or with too many names, the file has its
  // number.
  void name_table(uint32_t table, const String& name) noexcept;

 private:
  struct alignas(64) Slot {
    std::atomic<bool> busy{false};
    bool written = false;
    TraceEvent event;
  };
  static_assert(sizeof(Slot) == 64, "frugal.h states the size");
  struct Ring : HeapObject {
    Mapping memory;
    Slot* slots = nullptr;
    size_t size = 0;
    uint64_t begun = 0, id = 0;
    std::atomic<uint64_t> next{0};
    ~Ring() { os_release(&memory); }
  };
  void end() noexcept REQUIRES(mu_);
  void clear() noexcept REQUIRES(mu_);
  static Status write(const Ring& ring, const Map<uint32_t, String>& names, const char* path);

  std::atomic<bool> on_{false};
  std::atomic<Ring*> ring_{nullptr};  // while recording
  std::atomic<uint32_t> users_{0};
  Mutex mu_;  // one start or stop at a time, with the writing of the file
  std::unique_ptr<Ring> kept_ GUARDED_BY(mu_);  // the ring, recording or not
  uint64_t last_id_ GUARDED_BY(mu_) = 0;
  Mutex names_mu_;  // held for a moment only: creating a table takes it
  Map<uint32_t, String> names_ GUARDED_BY(names_mu_);
};

// A span from here to the end of the scope, if something is recorded when it begins.
class TraceSpan {
 public:
  TraceSpan(Trace& trace, SpanKind span) : trace_(trace), on_(trace.on()) {
    if (on_) begin(span);
  }
  ~TraceSpan() {
    if (on_) trace_.record(event_);
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

  TraceSpan& step(uint64_t step) {
    return set([&] { event_.step = step; });
  }
  TraceSpan& rank(uint32_t rank) {
    return set([&] { event_.rank = rank; });
  }
  TraceSpan& table(uint32_t table) {
    return set([&] { event_.table = table; });
  }
  TraceSpan& count(uint64_t count) {
    return set([&] { event_.count = count; });
  }
  TraceSpan& more(uint64_t count) {
    return set([&] { event_.count += count; });
  }
  TraceSpan& waited(uint32_t bits) {
    return set([&] { event_.waited |= static_cast<uint16_t>(bits); });
  }
  // Records nothing: there was nothing to do.
  void drop() { on_ = false; }

 private:
  void begin(SpanKind span) {
    new (&event_) TraceEvent;
    event_.span = span;
    event_.begin = now_ns();
  }
  template <class F>
  TraceSpan& set(F set_it) {
    if (on_) set_it();
    return *this;
  }

  Trace& trace_;
  bool on_;
  union {  // not initialized while nothing is recorded
    TraceEvent event_;
  };
};

// Appends `text` to `out`, escaped for a quoted string of JSON or of a Prometheus label. Bytes that
// are no UTF-8 become \xHH, with the backslash escaped.
void append_escaped(const char* text, size_t bytes, bool json, String* out);

}  // namespace frugal
