// A program that links the library keeps its own malloc and operator new, and training does not
// grow its heap.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "frugal.h"

namespace {

// The file that a name of this program stands in.
std::string HomeOf(const char* name) {
  Dl_info info;
  void* at = dlsym(RTLD_DEFAULT, name);
  if (at == nullptr || dladdr(at, &info) == 0) return std::string();
  return info.dli_fname;
}

uint64_t HostBytes() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

struct Buffers {
  std::vector<uint64_t> keys;
  std::vector<float> rows, grads;
};

void Train(frugal_trainer* trainer, frugal_table* const (&tables)[2], uint64_t first,
           uint64_t steps, Buffers* b) {
  for (uint64_t s = first; s < first + steps; ++s) {
    frugal_op ops[2];
    for (int t = 0; t < 2; ++t) {
      ops[t] = FRUGAL_OP_INIT;
      ops[t].table = tables[t];
      ops[t].keys = b->keys.data();
      ops[t].count = b->keys.size();
      ops[t].rows_out = b->rows.data();
      ops[t].grads = b->grads.data();
    }
    for (size_t i = 0; i < b->keys.size(); ++i) b->keys[i] = (s * 7919 + i * i) % 20'000;
    frugal_batch* batch = nullptr;
    ASSERT_EQ(FRUGAL_OK, frugal_prefetch(trainer, s, ops, 2, &batch));
    ASSERT_EQ(FRUGAL_OK, frugal_step_begin(trainer, s, FRUGAL_TIMEOUT_DEFAULT));
    ops[0].batch = batch;  // the second is found by its keys
    ASSERT_EQ(FRUGAL_OK, frugal_lookup(trainer, ops, 2));
    ASSERT_EQ(FRUGAL_OK, frugal_push_grad(trainer, ops, 2));
    if (s % 3 == 0) {
      ASSERT_EQ(FRUGAL_OK, frugal_push_grad(trainer, ops + 1, 1));
    }
    ASSERT_EQ(FRUGAL_OK, frugal_step_end(trainer, s, 0));
  }
}

TEST(Host, MallocAndNewAreItsOwn) {
  frugal_engine* engine = nullptr;
  ASSERT_EQ(FRUGAL_OK, frugal_open(nullptr, &engine));
  const std::string libc = HomeOf("gnu_get_libc_version");
  ASSERT_FALSE(libc.empty());
  for (const char* name : {"malloc", "calloc", "realloc", "free", "aligned_alloc", "posix_memalign",
                           "malloc_usable_size"}) {
    EXPECT_EQ(HomeOf(name), libc) << name;
  }
  const std::string standard = HomeOf("_ZSt9terminatev");
  for (const char* name : {"_Znwm", "_Znam", "_ZdlPv", "_ZdlPvm", "_ZdaPv"}) {
    EXPECT_EQ(HomeOf(name), standard) << name;
  }
  // And it is used: the host's memory is counted by its malloc.
  const uint64_t before = HostBytes();
  void* volatile mine = std::malloc(50'000);
  EXPECT_GE(HostBytes(), before + 50'000);
  std::free(mine);
  EXPECT_EQ(FRUGAL_OK, frugal_close(engine));
}

TEST(Host, TheEngineLivesElsewhere) {
  // What the process has once: the loaded library, the registry of handles.
  frugal_engine* first = nullptr;
  ASSERT_EQ(FRUGAL_OK, frugal_open(nullptr, &first));
  ASSERT_EQ(FRUGAL_OK, frugal_close(first));
  for (int32_t mode : {FRUGAL_FLUSH_AT_ONCE, FRUGAL_FLUSH_DEFERRED, FRUGAL_FLUSH_TREE_HEAP}) {
    SCOPED_TRACE(mode);
    Buffers buffers;
    buffers.keys.resize(5000);
    buffers.rows.resize(5000 * 16);
    buffers.grads.resize(5000 * 16, 0.5f);
    const uint64_t before = HostBytes();
    frugal_config config = FRUGAL_CONFIG_INIT;
    config.flush_threads = 1;
    config.flush_mode = mode;
    frugal_engine* engine = nullptr;
    ASSERT_EQ(FRUGAL_OK, frugal_open(&config, &engine));
    frugal_table* tables[2];
    for (int t = 0; t < 2; ++t) {
      frugal_table_config c = FRUGAL_TABLE_CONFIG_INIT;
      c.name = t ? "a table with a name too long for a short string" : "t";
      c.key_space = t ? FRUGAL_HASHED : FRUGAL_DENSE;
      c.rows = 20'000;
      c.dim = 16;
      c.optimizer.kind = FRUGAL_ADAGRAD;
      ASSERT_EQ(FRUGAL_OK, frugal_table_create(engine, &c, &tables[t]));
    }
    frugal_trainer_config t = FRUGAL_TRAINER_CONFIG_INIT;
    t.cache_ratio = 0.1;
    frugal_trainer* trainer = nullptr;
    ASSERT_EQ(FRUGAL_OK, frugal_trainer_create(engine, &t, &trainer));
    Train(trainer, tables, 0, 20, &buffers);
    const uint64_t opened = HostBytes();
    // A thread's bookkeeping, the C library's own.
    EXPECT_LE(opened, before + 4096);
    Train(trainer, tables, 20, 200, &buffers);
    EXPECT_LE(HostBytes(), opened + 1024);
    EXPECT_EQ(FRUGAL_OK, frugal_close(engine));
    EXPECT_LE(HostBytes(), before + 4096);
  }
}

#ifdef FRUGAL_TEST_MIMALLOC
TEST(Host, TheLibraryBringsMimalloc) {
  frugal_engine* engine = nullptr;
  ASSERT_EQ(FRUGAL_OK, frugal_open(nullptr, &engine));
  void* library = dlopen(FRUGAL_TEST_MIMALLOC, RTLD_NOW | RTLD_NOLOAD);
  ASSERT_NE(library, nullptr) << FRUGAL_TEST_MIMALLOC << " is not loaded";
  EXPECT_EQ(dlsym(RTLD_DEFAULT, "mi_malloc"), nullptr);
  dlclose(library);
  EXPECT_EQ(FRUGAL_OK, frugal_close(engine));
}
#endif

}  // namespace
