/* The C side of overhead.py: repeats lookup and push of one op. Returns nanoseconds or a status. */
#define _POSIX_C_SOURCE 200809L
#include <time.h>

#include "frugal.h"

FRUGAL_API int64_t pairs(int32_t (*lookup)(frugal_trainer *, const frugal_op *, size_t),
                         int32_t (*push)(frugal_trainer *, const frugal_op *, size_t),
                         frugal_trainer *trainer, frugal_table *table, const frugal_batch *batch,
                         float *rows, const float *grads, int64_t count) {
  struct timespec begin, end;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  for (int64_t n = 0; n < count; ++n) {
    frugal_op op = FRUGAL_OP_INIT;
    int32_t status;
    op.table = table;
    op.batch = batch;
    op.rows_out = rows;
    status = lookup(trainer, &op, 1);
    if (status != FRUGAL_OK) return status;
    op.rows_out = NULL;
    op.grads = grads;
    status = push(trainer, &op, 1);
    if (status != FRUGAL_OK) return status;
  }
  clock_gettime(CLOCK_MONOTONIC, &end);
  return (end.tv_sec - begin.tv_sec) * INT64_C(1000000000) + (end.tv_nsec - begin.tv_nsec);
}
