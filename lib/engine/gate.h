// What a step waits for before it begins: ordered conditions, each with a text for messages and
// work that a waiting thread helps with.
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
  // A step that is to begin, and what its conditions found at the last check.
  struct Pass {
    uint64_t step = 0;
    size_t at = 0;            // the first condition that is closed
    uint32_t waited = 0;      // bits of conditions that were closed at a check
    bool in_flight = false;   // it waited for rows that were being written
    bool everything = false;  // everything that is pending has to be written
    uint64_t declared = 0;    // the first step with a part that is not resolved or linked
    size_t table = 0;         // the table whose updates it waits for
  };
  struct Condition {
    uint32_t bit;  // for Pass::waited
    std::function<bool(Pass&)> open;
    std::function<String(const Pass&)> what;
    std::function<bool(const Pass&)> help;  // one unit of work; or none
  };

  void add(Condition condition) { conditions_.push_back(std::move(condition)); }
  // One check.
  bool open(Pass* pass) const REQUIRES(control) {
    for (pass->at = 0; pass->at < conditions_.size(); ++pass->at) {
      const Condition& c = conditions_[pass->at];
      if (c.open(*pass)) continue;
      pass->waited |= c.bit;
      return false;
    }
    return true;
  }
  // What the step waits for, as of the last check.
  String what(const Pass& pass) const REQUIRES(control) {
    if (pass.at >= conditions_.size()) return "nothing any more";
    return conditions_[pass.at].what(pass);
  }
  // Does one unit of work for that condition, or for a later one. False: there is none.
  bool help(const Pass& pass) const {
    for (size_t i = pass.at; i < conditions_.size(); ++i)
      if (conditions_[i].help && conditions_[i].help(pass)) return true;
    return false;
  }

 private:
  Vector<Condition> conditions_;
};

}  // namespace frugal
