// What a step waits for before it begins: conditions, in order, each with what it waits for and how
// a waiter helps.
#pragma once
#include <cstdint>
#include <functional>
#include <utility>

#include "base/heap.h"
#include "base/status.h"
#include "engine/control.h"

namespace frugal {

class Gate {
 public:
  // A step that is to begin, and what conditions have found of it at the last look.
  struct Pass {
    uint64_t step = 0;
    size_t at = 0;              // the first condition that is closed
    uint32_t waited = 0;        // bits of those that have been closed at a look
    bool in_flight = false;     // rows that it waited for were being written
    bool everything = false;    // all that is pending has to be written
    uint64_t declared = 0;      // the first step of which something is not resolved or linked
    size_t table = 0;           // whose updates it waits for
  };
  struct Condition {
    uint32_t bit;  // for Pass::waited
    std::function<bool(Pass&)> open;
    std::function<String(const Pass&)> what;
    std::function<bool(const Pass&)> help;  // one unit of work; or none
  };

  void add(Condition condition) { conditions_.push_back(std::move(condition)); }
  // One look.
  bool open(Pass* pass) const REQUIRES(control) {
    for (pass->at = 0; pass->at < conditions_.size(); ++pass->at) {
      const Condition& c = conditions_[pass->at];
      if (c.open(*pass)) continue;
      pass->waited |= c.bit;
      return false;
    }
    return true;
  }
  // What the last look waits for.
  String what(const Pass& pass) const REQUIRES(control) {
    if (pass.at >= conditions_.size()) return "nothing any more";
    return conditions_[pass.at].what(pass);
  }
  // Does one unit of what that condition, or else one behind it, waits for. False: there is none.
  bool help(const Pass& pass) const {
    for (size_t i = pass.at; i < conditions_.size(); ++i)
      if (conditions_[i].help && conditions_[i].help(pass)) return true;
    return false;
  }

 private:
  Vector<Condition> conditions_;
};

}  // namespace frugal
