#include "process/joins.h"

namespace frugal {

Status RankJoins::ask(const frugal_trainer_config& config, JoinReply* reply) {
  FRUGAL_ASSERT(of(config.rank).now.load());  // it has a Scope
  try {
    return controller_.answered(
        controller_.control().join(config, controller_.timeout_ms(), reply));
  } catch (const std::bad_alloc&) {
    return fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory to join as rank %u", config.rank);
  }
}

Status RankJoins::lose(uint32_t rank, uint64_t joined) noexcept {
  FRUGAL_ASSERT(of(rank).now.load());
  of(rank).join_unknown.store(true);
  Status s;
  try {
    s = controller_.answered(
        controller_.control().leave(rank, true, controller_.timeout_ms(), joined));
  } catch (const std::bad_alloc&) {
    s = fail(FRUGAL_ERR_OUT_OF_MEMORY,
             "no memory to leave rank %u, which this process may have joined; call again", rank);
  }
  if (s != FRUGAL_OK && s != FRUGAL_ERR_NOT_FOUND) return s;
  of(rank).join_unknown.store(false);
  return FRUGAL_OK;
}

}  // namespace frugal
