// How a call of the engine waits (it checks, helps and sleeps), and how it makes room. Only the
// engine's sources include this file.
#pragma once
#include "base/handles.h"
#include "engine/engine.h"

namespace frugal {

constexpr uint64_t kToldNs = 1'000'000'000;  // for the notice of a loss
// Waits until ready(). help() does one unit of the work that ready() needs, and returns whether
// there was any. FRUGAL_ERR_TIMEOUT and FRUGAL_ERR_STEP_ABORTED are returned without a message: the
// caller knows what it waited for.
template <class Ready, class Help>
Status Engine::wait(Deadline deadline, Trainer* trainer, Ready ready, Help help) {
  auto ended = [&]() -> Status {
    if (closed() || (trainer && trainer->closing.load()))
      return fail(FRUGAL_ERR_CLOSED, "the %s was closed while a call waited",
                  closed() ? "engine" : "trainer");
    FRUGAL_TRY(workers_.healthy());
    if (trainer && trainer->abort_notice.load()) return FRUGAL_ERR_STEP_ABORTED;
    return trainer && trainer->gpu && trainer->gpu->sticky() ? trainer->gpu->ready() : FRUGAL_OK;
  };
  // Other work may give back the memory that is lacking here: updates do, once they are written.
  auto poll_or_help = [&] {
    bool lacking = false;
    try {
      if (poll_device_work()) return true;
    } catch (const std::bad_alloc&) {
      lacking = true;
    }
    const bool worked = help();
    if (!worked && lacking) throw std::bad_alloc();
    return worked;
  };
  return workers_.wait(deadline.at, ended, ready, poll_or_help, [&] { return in_flight(); });
}

template <class Ready, class Help>
Status Engine::wait_for_ranks(Deadline deadline, Trainer* trainer, Ready ready, Help help) {
  bool found = false;
  auto look = [&] {
    if (ready()) return true;
    found = find_unresponsive() || found;
    return false;
  };
  Status s;
  do s = wait(deadline.within(liveness_.look()), trainer, look, help);
  while (s == FRUGAL_ERR_TIMEOUT && !deadline.passed());
  // As a rule that is at the end of the time-out. The abort with its notice is on its way.
  if (s == FRUGAL_ERR_TIMEOUT && found && trainer)
    s = wait(
        {now_ns() + kToldNs}, trainer, [] { return false; }, [] { return false; });
  return s;
}

template <class Call>
Status Engine::with_room(const frugal_op* ops, size_t n, Call call) {
  Status s = call();
  if (s != FRUGAL_ERR_TABLE_FULL) return s;
  struct PauseReserving {
    Vector<TableRef> tables;
    ~PauseReserving() {
      for (const TableRef& t : tables) --t->reserving_paused;
    }
  } paused{{}};
  paused.tables.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    const TableRef table = std::static_pointer_cast<Table>(object_of<AnyTable>(ops[i].table));
    if (!table || table->rows.keys_are_slots()) continue;
    // (Also where nothing is reserved by now: a declaration that found no room had taken some for a
    // moment.)
    ++table->reserving_paused;
    paused.tables.push_back(table);
    give_up_reserved(*table);
  }
  return paused.tables.empty() ? s : call();
}

}  // namespace frugal
