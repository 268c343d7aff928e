/*
 * Frugal in one page of C: open an engine, train two rows for ten steps, read them.
 *   cc hello.c $(pkg-config --cflags --libs frugal) -o hello && ./hello
 * The same program in other languages: hello.cpp, hello.py, hello.rs, hello.jl.
 */
#include <frugal.h>
#include <stdio.h>
#include <stdlib.h>

enum { kDim = 4, kKeys = 3, kSteps = 10 };

/* Every function returns 0 or a negative status; frugal_last_error has the message. */
static void check(int32_t status) {
  frugal_error error;
  if (status == FRUGAL_OK) return;
  frugal_last_error(&error);
  fprintf(stderr, "%s: %s\n", frugal_status_name(status), error.message);
  exit(1);
}

int main(void) {
  /* An engine with all defaults: one rank, keys declared up to ten steps ahead. */
  frugal_engine *engine;
  check(frugal_open(NULL, &engine));

  /* A table of 1000 rows of 4 floats, all zeros, trained by SGD. */
  frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
  config.name = "items";
  config.rows = 1000;
  config.dim = kDim;
  config.optimizer.lr = 0.1f;
  frugal_table *table;
  check(frugal_table_create(engine, &config, &table));

  frugal_trainer_config trainer_config = FRUGAL_TRAINER_CONFIG_INIT;
  frugal_trainer *trainer;
  check(frugal_trainer_create(engine, &trainer_config, &trainer));

  /* Rows 7 and 42 learn to be ones. Key 7 comes twice: its gradients are summed. */
  const uint64_t keys[kKeys] = {7, 42, 7};
  float rows[kKeys * kDim], grads[kKeys * kDim];
  frugal_op declare = FRUGAL_OP_INIT;
  declare.table = table;
  declare.keys = keys;
  declare.count = kKeys;
  frugal_batch *batch, *next;
  check(frugal_prefetch(trainer, 0, &declare, 1, &batch));

  for (uint64_t step = 0; step < kSteps; ++step) {
    /* What the next step needs is brought up to date while this one computes. */
    check(frugal_prefetch(trainer, step + 1, &declare, 1, &next));
    check(frugal_step_begin(trainer, step, FRUGAL_TIMEOUT_DEFAULT));

    frugal_op op = FRUGAL_OP_INIT; /* exactly the declared keys */
    op.table = table;
    op.batch = batch;
    op.rows_out = rows;
    op.grads = grads;
    check(frugal_lookup(trainer, &op, 1));

    double loss = 0; /* half the squared distance from one, whose gradient is row - 1 */
    for (int i = 0; i < kKeys * kDim; ++i) {
      grads[i] = rows[i] - 1.0f;
      loss += 0.5 * grads[i] * grads[i];
    }
    check(frugal_push_grad(trainer, &op, 1));
    check(frugal_step_end(trainer, step, 0));
    printf("step %d: loss %.6f\n", (int)step, loss);
    batch = next;
  }

  /* Outside steps rows are read by their keys. */
  check(frugal_get(table, keys, 2, 0, rows, 0, NULL));
  for (int i = 0; i < 2; ++i) {
    printf("row %d:", (int)keys[i]);
    for (int c = 0; c < kDim; ++c) printf(" %.6f", rows[i * kDim + c]);
    printf("\n");
  }
  check(frugal_close(engine)); /* its tables and trainers with it */
  return 0;
}
