/*
 * Biased matrix factorization: rating = mean + user bias + item bias + user row . item row.
 *   movielens [FILE]    lines of FILE: user TAB item TAB rating TAB anything, as in u.data
 * Without a file it makes ratings from planted rows and noise, so that the best possible error is
 * known. README.md says exactly what is computed; the other languages print the same numbers.
 */
#include <errno.h>
#include <frugal.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kDim = 4, kBatch = 256, kEpochs = 10, kAhead = 4, kTables = 4 };
enum { kUsers = 400, kItems = 300, kRatings = 50000 }; /* of the planted set */

static const char kBlanks[] = " \t\r";

typedef struct rating {
  uint64_t user, item;
  float value;
  double noise; /* planted: what no model can know */
} rating;

static void check(int32_t status) {
  frugal_error error;
  if (status == FRUGAL_OK) return;
  frugal_last_error(&error);
  fprintf(stderr, "%s: %s\n", frugal_status_name(status), error.message);
  exit(1);
}

static void *not_null(void *memory) {
  if (memory == NULL) {
    fprintf(stderr, "out of memory\n");
    exit(1);
  }
  return memory;
}

static void *allocate(size_t count, size_t size) { return not_null(calloc(count, size)); }

static void *grow(void *memory, size_t size) { return not_null(realloc(memory, size)); }

/* --- Data --- */

static uint64_t next_random(uint64_t *state) { /* splitmix64 */
  uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return z ^ (z >> 31);
}

/* Nearly normal, with mean 0 and deviation 1: exact, so that every language has the same bits. */
static double next_normal(uint64_t *state) {
  double sum = 0;
  for (int i = 0; i < 12; ++i) sum += (double)(next_random(state) >> 40) / 16777216;
  return sum - 6;
}

static rating *plant(size_t *count) {
  uint64_t state = 1;
  static double user_bias[kUsers], item_bias[kItems], users[kUsers][kDim], items[kItems][kDim];
  for (int u = 0; u < kUsers; ++u) user_bias[u] = 0.4 * next_normal(&state);
  for (int i = 0; i < kItems; ++i) item_bias[i] = 0.4 * next_normal(&state);
  for (int u = 0; u < kUsers; ++u)
    for (int c = 0; c < kDim; ++c) users[u][c] = 0.6 * next_normal(&state);
  for (int i = 0; i < kItems; ++i)
    for (int c = 0; c < kDim; ++c) items[i][c] = 0.6 * next_normal(&state);
  rating *ratings = allocate(*count = kRatings, sizeof(*ratings));
  for (size_t n = 0; n < kRatings; ++n) {
    const uint64_t u = next_random(&state) % kUsers, i = next_random(&state) % kItems;
    ratings[n].user = u;
    ratings[n].item = i;
    ratings[n].noise = 0.3 * next_normal(&state);
    double value = 3.5 + user_bias[u] + item_bias[i];
    for (int c = 0; c < kDim; ++c) value += users[u][c] * items[i][c];
    ratings[n].value = (float)(value + ratings[n].noise);
  }
  return ratings;
}

/* The text of a file, followed by a zero. */
static char *read_all(const char *path, size_t *size) {
  FILE *file = fopen(path, "rb");
  char *text = NULL;
  size_t capacity = 0;
  *size = 0;
  while (file != NULL && !feof(file) && !ferror(file)) {
    if (*size + 1 >= capacity) text = grow(text, capacity = capacity * 2 + 65536);
    *size += fread(text + *size, 1, capacity - *size - 1, file);
  }
  if (file == NULL || ferror(file)) {
    perror(path);
    exit(1);
  }
  fclose(file);
  text[*size] = 0;
  return text;
}

/* Each of these returns where it ended, or NULL if the text was NULL or not what it skips or
 * reads. */

static const char *skip_digits(const char *at) {
  const size_t count = at != NULL ? strspn(at, "0123456789") : 0;
  return count > 0 ? at + count : NULL;
}

static const char *skip_sign(const char *at) { return at + (*at == '+' || *at == '-'); }

static const char *read_key(const char *at, uint64_t *key) { /* and the blanks after it */
  const char *end = skip_digits(at);
  const size_t blanks = end != NULL ? strspn(end, kBlanks) : 0;
  if (blanks == 0) return NULL;
  errno = 0;
  *key = strtoull(at, NULL, 10);
  return errno == 0 ? end + blanks : NULL;
}

static const char *read_value(const char *at, float *value) {
  const char *end = at != NULL ? skip_digits(skip_sign(at)) : NULL;
  if (end != NULL && *end == '.') end = skip_digits(end + 1);
  if (end != NULL && *end == 'e') end = skip_digits(skip_sign(end + 1));
  if (end == NULL) return NULL;
  *value = (float)strtod(at, NULL);
  return isfinite(*value) ? end : NULL;
}

static rating *load(const char *path, size_t *count) {
  rating *ratings = NULL;
  size_t size, capacity = 0, number = 1;
  char *text = read_all(path, &size);
  const char *end = text + size, *next = text;
  *count = 0;
  for (const char *line = text; line < end; line = next, ++number) {
    const char *newline = memchr(line, '\n', (size_t)(end - line));
    const char *at = line + strspn(line, kBlanks);
    rating one = {0, 0, 0, 0};
    next = newline != NULL ? newline + 1 : end;
    if (at == end || at == newline) continue;
    at = read_value(read_key(read_key(at, &one.user), &one.item), &one.value);
    if (at == NULL || (at != end && at != newline && strspn(at, kBlanks) == 0)) {
      fprintf(stderr, "%s: line %zu is not of the form user, item, rating\n", path, number);
      exit(1);
    }
    if (*count == capacity) {
      capacity = capacity * 2 + 1024;
      ratings = grow(ratings, capacity * sizeof(*ratings));
    }
    ratings[(*count)++] = one;
  }
  free(text);
  if (*count < 10) {
    fprintf(stderr, "%s: %zu ratings, at least 10 are needed\n", path, *count);
    exit(1);
  }
  return ratings;
}

/* --- Model: a batch of ratings, its four ops and their buffers --- */

static frugal_table *tables[kTables]; /* users, items, user biases, item biases */
static uint64_t keys[2][kBatch];
static float rows[kTables][kBatch * kDim], grads[kTables][kBatch * kDim];
static float errors[kBatch];

/* Ops on the users and items of n ratings, by their keys or by a declared batch. */
static void set_ops(frugal_op ops[kTables], const rating *const *ratings, size_t n,
                    const frugal_batch *batch) {
  for (size_t k = 0; k < n; ++k) {
    keys[0][k] = ratings[k]->user;
    keys[1][k] = ratings[k]->item;
  }
  for (int t = 0; t < kTables; ++t) {
    frugal_op_init(&ops[t]);
    ops[t].table = tables[t];
    ops[t].batch = batch;
    ops[t].part = (uint32_t)t;
    ops[t].keys = batch != NULL ? NULL : keys[t % 2];
    ops[t].count = n;
    ops[t].rows_out = rows[t];
    ops[t].grads = grads[t];
  }
}

/* Sets `errors` from `rows`, and returns the sum of their squares. */
static double compare(float mean, const rating *const *ratings, size_t n) {
  double squares = 0;
  for (size_t k = 0; k < n; ++k) {
    float guess = mean + rows[2][k] + rows[3][k];
    for (int c = 0; c < kDim; ++c) guess += rows[0][k * kDim + c] * rows[1][k * kDim + c];
    errors[k] = ratings[k]->value - guess;
    squares += (double)errors[k] * errors[k];
  }
  return squares;
}

int main(int argc, char **argv) {
  size_t count, train = 0, test = 0;
  rating *ratings = argc > 1 ? load(argv[1], &count) : plant(&count);
  const rating **order = allocate(count, sizeof(*order)), **held = allocate(count, sizeof(*held));
  double sum = 0, noise = 0;
  for (size_t n = 0; n < count; ++n) { /* every tenth rating is for the test */
    if (n % 10 == 9) {
      held[test++] = &ratings[n];
      noise += ratings[n].noise * ratings[n].noise;
    } else {
      order[train++] = &ratings[n];
      sum += ratings[n].value;
    }
  }
  const float mean = (float)(sum / (double)train);
  printf("%zu ratings to train, %zu to test, mean %.4f\n", train, test, mean);

  frugal_engine *engine;
  check(frugal_open(NULL, &engine));
  static const char *const names[kTables] = {"users", "items", "user biases", "item biases"};
  for (int t = 0; t < kTables; ++t) {
    frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
    config.name = names[t];
    config.key_space = FRUGAL_HASHED; /* any id will do; rows come with their first use */
    config.rows = train;
    config.dim = t < 2 ? kDim : 1;
    config.init = t < 2 ? FRUGAL_INIT_NORMAL : FRUGAL_INIT_CONSTANT;
    config.init_b = t < 2 ? 0.1f : 0.0f;
    config.optimizer.kind = FRUGAL_ADAGRAD;
    config.optimizer.lr = 0.1f;
    config.optimizer.weight_decay_l2 = 0.02f;
    check(frugal_table_create(engine, &config, &tables[t]));
  }
  frugal_trainer_config trainer_config = FRUGAL_TRAINER_CONFIG_INIT;
  frugal_trainer *trainer;
  check(frugal_trainer_create(engine, &trainer_config, &trainer));

  uint64_t state = 2, step = 0;
  frugal_op ops[kTables];
  const size_t batches = (train + kBatch - 1) / kBatch;
  for (int epoch = 1; epoch <= kEpochs; ++epoch) {
    for (size_t n = train; n > 1; --n) { /* Fisher and Yates */
      const size_t other = next_random(&state) % n;
      const rating *swapped = order[n - 1];
      order[n - 1] = order[other];
      order[other] = swapped;
    }
    double train_squares = 0, test_squares = 0;
    frugal_batch *declared[kAhead + 1]; /* of batch b at b modulo kAhead + 1 */
    size_t next = 0;                    /* batch that is to be declared */
    for (size_t b = 0; b < batches; ++b, ++step) {
      for (; next < batches && next <= b + kAhead; ++next) {
        const size_t n = next + 1 < batches ? kBatch : train - next * kBatch;
        set_ops(ops, order + next * kBatch, n, NULL);
        check(frugal_prefetch(trainer, step + (next - b), ops, kTables,
                              &declared[next % (kAhead + 1)]));
      }
      const rating *const *some = order + b * kBatch;
      const size_t n = b + 1 < batches ? kBatch : train - b * kBatch;
      set_ops(ops, some, n, declared[b % (kAhead + 1)]);
      check(frugal_step_begin(trainer, step, FRUGAL_TIMEOUT_DEFAULT));
      check(frugal_lookup(trainer, ops, kTables));
      train_squares += compare(mean, some, n);
      for (size_t k = 0; k < n; ++k) { /* of half the squared error */
        for (int c = 0; c < kDim; ++c) {
          grads[0][k * kDim + c] = -errors[k] * rows[1][k * kDim + c];
          grads[1][k * kDim + c] = -errors[k] * rows[0][k * kDim + c];
        }
        grads[2][k] = grads[3][k] = -errors[k];
      }
      check(frugal_push_grad(trainer, ops, kTables));
      check(frugal_step_end(trainer, step, 0));
    }
    for (size_t from = 0; from < test; from += kBatch) { /* rows that are missing read as zeros */
      const size_t n = test - from < kBatch ? test - from : kBatch;
      set_ops(ops, held + from, n, NULL);
      check(frugal_read(engine, NULL, ops, kTables, FRUGAL_TIMEOUT_DEFAULT));
      test_squares += compare(mean, held + from, n);
    }
    printf("epoch %2d: train RMSE %.4f, test RMSE %.4f\n", epoch,
           sqrt(train_squares / (double)train), sqrt(test_squares / (double)test));
  }
  if (argc == 1) printf("known optimum: test RMSE %.4f\n", sqrt(noise / (double)test));
  check(frugal_close(engine));
  free(ratings);
  free(order);
  free(held);
  return 0;
}
