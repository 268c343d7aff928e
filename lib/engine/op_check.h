// Whether ops are well formed: what can be told without looking for their keys.
#pragma once
#include <cstdint>

#include "base/status.h"
#include "frugal.h"

namespace frugal {

enum class Use { kLookup, kPush, kRead, kDeclare };

// Is it memory of the host? `what` names it where it is not.
Status host_memory(const void* p, const char* what);
// The same for all that ops of a rank on the cpu device point to.
Status host_memory(const frugal_op* ops, size_t n);

// An op of so many keys on a table. `offsets_elsewhere`: on a device, where kernels will look at them.
Status check_op(const frugal_op& op, const char* table, uint32_t dim, size_t keys, Use use,
                bool offsets_elsewhere = false);

}  // namespace frugal
