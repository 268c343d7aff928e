// For a table with a storage tier (storage/storage_tier.h): declared parts with rows that may still
// be loading, and steps whose calls need slots and find none.
//
// The lock is taken below that of declarations, and above the rows'.
#pragma once
#include <algorithm>
#include <iterator>

#include "base/sync.h"
#include "storage/stored_rows.h"
#include "window/part.h"

namespace frugal {

class LoadingParts {
 public:
  // Reserves memory for one part of this step. Throws if there is none. Afterwards lacks() and
  // add() of the part do not throw.
  void make_room(uint64_t step) {
    Lock lock(mu_);
    OfStep& s = steps_[step];
    reserve(&s.parts, s.expected);
    reserve(&lacking_, expected_);
    ++s.expected;
    ++expected_;
  }
  // Adds a part that make_room() has reserved for, if it was resolved (not null).
  void add(uint64_t step, const PartRef& part) {
    Lock lock(mu_);
    OfStep& s = steps_.at(step);
    --s.expected;
    --expected_;
    if (part) s.parts.push_back({part, 0});
  }
  // Is a row loading that is declared for a step up to `step`? Dropped parts do not count; they
  // keep their memory until a gate checks.
  bool until(StoredRows& tier, uint64_t step) {
    Lock lock(mu_);
    bool any = false;
    for (auto at = steps_.begin(); at != steps_.end() && at->first <= step;) {
      OfStep& s = at->second;
      std::erase_if(s.parts, [&](OfPart& p) { return !p.loads(tier); });
      any = any || !s.parts.empty();
      at = s.parts.empty() && s.expected == 0 ? steps_.erase(at) : std::next(at);
    }
    return any;
  }

  // While this lives, a call of a step needs slots, and declarations of later steps take none.
  class Wanted {
   public:
    Wanted(LoadingParts& of, uint64_t step) : of_(of), step_(step) { of_.want(step, 1); }
    ~Wanted() { of_.want(step_, -1); }
    Wanted(const Wanted&) = delete;

   private:
    LoadingParts& of_;
    const uint64_t step_;
  };
  // A part that make_room() has reserved for found no slots. It lacks them until it is resolved or
  // dropped. Called before add().
  void lacks(const PartRef& part) {
    Lock lock(mu_);
    if (std::find(lacking_.begin(), lacking_.end(), part) == lacking_.end())
      lacking_.push_back(part);
  }
  // Would a part search for slots without success? Either an earlier step needs some, or the part
  // has found none and no slot has been released since.
  bool held_up(const Part& part, const StoredRows& tier) {
    Lock lock(mu_);
    forget_served();
    if (!wanted_.empty() && wanted_.begin()->first < part.step) return true;
    return std::any_of(lacking_.begin(), lacking_.end(), [&](const PartRef& p) {
      return p->step < part.step || (p.get() == &part && tier.lacking());
    });
  }
  // Does a call of a step up to `step`, or a part declared for one, still lack slots? A call lacks
  // them for as long as its Wanted lives, even if it has released others.
  bool lacking_until(uint64_t step, const StoredRows& tier) {
    Lock lock(mu_);
    forget_served();
    if (!wanted_.empty() && wanted_.begin()->first <= step) return true;
    return tier.lacking() && std::any_of(lacking_.begin(), lacking_.end(),
                                         [&](const PartRef& p) { return p->step <= step; });
  }

 private:
  void forget_served() REQUIRES(mu_) {
    std::erase_if(lacking_, [](const PartRef& p) { return p->state.load() >= Part::kResolved; });
  }
  void want(uint64_t step, int by) {
    Lock lock(mu_);
    if ((wanted_[step] += by) == 0) wanted_.erase(step);
  }
  struct OfPart {
    PartRef part;
    size_t at;  // rows before this one are loaded
    bool loads(StoredRows& tier) {
      if (part->state.load() > Part::kResolved) return false;
      at = tier.first_loading(part->row_slots(), at, part->distinct);
      return at != part->distinct;
    }
  };
  struct OfStep {
    Vector<OfPart> parts;
    size_t expected = 0;  // reserved, but not added yet
  };
  template <class T>
  static void reserve(Vector<T>* of, size_t more) {
    if (of->size() + more >= of->capacity()) of->reserve(2 * of->capacity() + 1);
  }
  Mutex mu_;
  Map<uint64_t, OfStep> steps_ GUARDED_BY(mu_);
  size_t expected_ GUARDED_BY(mu_) = 0;  // of all steps
  Map<uint64_t, int> wanted_ GUARDED_BY(mu_);
  Vector<PartRef> lacking_ GUARDED_BY(mu_);
};

}  // namespace frugal
