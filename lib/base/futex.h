// Sleeping on a 32-bit word in memory that processes share. Both calls only read the word: it may be
// mapped read-only.
#pragma once
#include <cstdint>

namespace frugal {

// Sleeps while the word is `seen`, at most `ns` (UINT64_MAX: for ever). It may also return early:
// callers look again.
void futex_wait(const uint32_t* word, uint32_t seen, uint64_t ns);
// Wakes all who sleep on the word, in any process.
void futex_wake(const uint32_t* word);

}  // namespace frugal
