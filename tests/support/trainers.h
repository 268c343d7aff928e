// A rank's trainer without an engine.
#pragma once
#include "engine/trainer.h"

namespace frugal {

inline TrainerRef trainer_of(uint32_t rank) {
  TrainerRef t = std::allocate_shared<Trainer>(HeapAllocator<Trainer>());
  t->rank = rank;
  return t;
}

}  // namespace frugal
