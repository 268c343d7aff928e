// What an engine's mutex guards: who is there, what is known of steps, which tables there are, and
// what runs beside what. The mode, and what is pending, are looked at without it, too.
#pragma once
#include "engine/control.h"
#include "engine/counters.h"
#include "engine/pacing.h"
#include "engine/phase.h"
#include "engine/ranks.h"
#include "engine/step_records.h"
#include "engine/tables.h"

namespace frugal {

struct ControlState {
  // `config` is what the engine makes of it, as long as it lives.
  ControlState(const frugal_config& config, uint32_t cpus, Counters& counters, Workers& workers)
      : pacing(config, cpus, &counters.pending_bytes_peak), ranks(config.world_size, mu),
        tables(config, mu, ranks), phase(mu, workers), records(mu, ranks) {}

  ControlMutex mu;
  Pacing pacing;  // updates end before it
  Ranks ranks;
  Tables tables;
  Phase phase;
  StepRecords records;
};

}  // namespace frugal
