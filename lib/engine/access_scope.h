// Rows that a call is about to use are not freed meanwhile. Included by the engine's sources only.
#pragma once
#include "engine/engine.h"

namespace frugal {

// While it lives, no reserved row of the tables is given up: a call may be about to use it.
class Engine::AccessScope {
 public:
  AccessScope(Engine& engine, const Vector<Access>& accesses)
      : engine_(engine), accesses_(accesses) {
    std::lock_guard<std::mutex> lock(engine_.mu_);
    for (const Access& a : accesses)
      if (counts(a)) ++a.table->accessing;
  }
  ~AccessScope() {
    for (const Access& a : accesses_) {
      if (!counts(a)) continue;
      // What is reserved only, now, is what a call that failed has left. Nothing of it is given to
      // others between this look and the next lines: this scope still counts.
      Vector<uint32_t> left;
      if (a.part && a.part->slots && a.part->state.load() != Part::kStale &&
          a.table->rows.has_reserved())
        engine_.unused_rows(*a.table, a.part->slots.as<uint32_t>(), a.part->n, &left);
      bool wanted;
      {
        std::lock_guard<std::mutex> lock(engine_.mu_);
        engine_.add_orphans(*a.table, left);
        --a.table->accessing;
        engine_.settle_orphans(*a.table);
        wanted = a.table->tight != 0;
      }
      if (wanted) engine_.progress();
    }
  }

 private:
  static bool counts(const Access& a) { return !a.whole && a.table->rows.hashed(); }
  Engine& engine_;
  const Vector<Access>& accesses_;
};

}  // namespace frugal
