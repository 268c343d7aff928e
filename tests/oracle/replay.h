// Does a script on the reference, one step after the other.
#ifndef FRUGAL_TESTS_ORACLE_REPLAY_H_
#define FRUGAL_TESTS_ORACLE_REPLAY_H_

#include <vector>

#include "oracle/script.h"
#include "reference/reference.h"

namespace frugal_oracle {

// The op as the reference takes it; the spec and the gradients have to outlive it.
frugal_reference::Op ReferenceOp(const OpSpec& spec, const std::vector<float>& grads);

// The reference's part of a script that is recorded.
void AddTables(const Script& script, frugal_reference::Reference* reference);

// Runs the whole script and fills in what the actions outside steps are to see. Afterwards
// `reference` knows every version of every row.
void Replay(Script* script, frugal_reference::Reference* reference);

}  // namespace frugal_oracle

#endif  // FRUGAL_TESTS_ORACLE_REPLAY_H_
