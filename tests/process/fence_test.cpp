// An attached process can write only its own rings and staging memory, however it opens or maps the
// files of shared memory.
//
// A trainer and an observer try each file that they have open. Tables that grow or are dropped give
// their memory back.
#include "fence.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <string>
#include <vector>

#include "controller.h"
#include "frugal.h"
#include "support/never.h"

namespace {

std::string Error() {
  frugal_error e;
  frugal_last_error(&e);
  return e.message;
}
#define OK(call) ASSERT_EQ(FRUGAL_OK, (call)) << #call << ": " << Error()

constexpr uint64_t kRows = 100000;
constexpr uint32_t kDim = 16;

bool HasFutureWrite() {
  const int fd = memfd_create("seal", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  const bool has = fcntl(fd, F_ADD_SEALS, 0x10) == 0;
  close(fd);
  return has;
}

// Every memfd of this process. Those in `own` are its own to write, the others are not. `others`:
// how many there are.
void AttackAll(size_t own, size_t others) {
  size_t mine = 0, theirs = 0;
  for (const std::string& file : open_files_of(getpid())) {
    if (file.find("memfd:") == std::string::npos) continue;
    const int fd = std::stoi(file);
    const bool writes = writable_mapping_of(fd) != nullptr;
    ++(writes ? mine : theirs);
    // Of its own only staging memory is sealed, which others read: what is mapped by now writes it.
    struct stat info {};
    EXPECT_EQ(0, fstat(fd, &info));
    if (!writes || info.st_size > int64_t{1} << 30) {
      EXPECT_EQ("", Attack(fd)) << file;
    }
  }
  EXPECT_EQ(own, mine);
  EXPECT_EQ(others, theirs);
}

// Nor through a mapping that it has already.
void AttackMappings() {
  std::vector<std::pair<char*, size_t>> all;
  std::FILE* maps = std::fopen("/proc/self/maps", "r");
  char line[512], mode[5];
  unsigned long from, to;
  while (std::fgets(line, sizeof line, maps))
    if (std::sscanf(line, "%lx-%lx %4s", &from, &to, mode) == 3 &&
        std::strstr(line, "memfd:frugal") && mode[1] != 'w')
      all.emplace_back(reinterpret_cast<char*>(from), to - from);
  std::fclose(maps);
  EXPECT_GE(all.size(), 6u);
  for (auto [base, bytes] : all) {
    EXPECT_NE(0, mprotect(base, bytes, PROT_READ | PROT_WRITE));
    EXPECT_NE(0, madvise(base, 4096, MADV_REMOVE));
  }
}

const char* const kNames[] = {"dense", "hashed", "lazy"};

void Get(frugal_table* table, std::vector<float>* rows) {
  std::vector<uint64_t> keys(1000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  rows->assign(keys.size() * 3 * kDim, 0);
  OK(frugal_get(table, keys.data(), keys.size(), FRUGAL_WITH_STATE, rows->data(), 0, nullptr));
}

TEST(Fence, TrainerAndObserver) {
  if (!HasFutureWrite()) GTEST_SKIP() << "this kernel has no F_SEAL_FUTURE_WRITE (Linux 5.1)";
  const Folder folder;
  ControllerProgram controller(folder.address());
  ASSERT_TRUE(controller.serves());
  frugal_config c = FRUGAL_CONFIG_INIT;
  const std::string address = folder.address();
  c.service = address.c_str();
  c.world_size = 1;
  frugal_engine *e, *observer;
  OK(frugal_open(&c, &e));
  frugal_table* tables[3];
  for (int i = 0; i < 3; ++i) {
    frugal_table_config t = FRUGAL_TABLE_CONFIG_INIT;
    t.name = kNames[i];
    t.rows = kRows;
    t.dim = kDim;
    t.optimizer.kind = FRUGAL_ADAM;
    t.key_space = i == 1 ? FRUGAL_HASHED : FRUGAL_DENSE;
    t.flags = i == 2 ? FRUGAL_TABLE_LAZY : 0;
    OK(frugal_table_create(e, &t, &tables[i]));
  }
  frugal_trainer_config as = FRUGAL_TRAINER_CONFIG_INIT;
  frugal_trainer* trainer;
  OK(frugal_trainer_create(e, &as, &trainer));
  // Rows of all tables, keys and gradients, as a job has them.
  std::vector<uint64_t> keys(1000);
  std::vector<float> grads(keys.size() * kDim, 0.5f), before[3], after;
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  auto step = [&](uint64_t s) {
    OK(frugal_step_begin(trainer, s, kNeverMs));
    for (frugal_table* table : tables) {
      frugal_op op = FRUGAL_OP_INIT;
      op.table = table;
      op.keys = keys.data();
      op.count = keys.size();
      op.grads = grads.data();
      OK(frugal_push_grad(trainer, &op, 1));
    }
    OK(frugal_step_end(trainer, s, 0));
  };
  step(0);
  OK(frugal_flush(e, kNeverMs));
  for (int i = 0; i < 3; ++i) Get(tables[i], &before[i]);

  // values and state of three tables, keys of one, flags of two, and the down regions of the
  // process and its trainer. Its own: two up regions, its staging memory.
  AttackAll(3, 3 * 2 + 1 + 2 + 2);
  AttackMappings();
  // An observer attacks its own attachment in the same way, next to the trainer's.
  c.flags = FRUGAL_OBSERVE;
  OK(frugal_open(&c, &observer));
  frugal_table* seen[3];
  for (int i = 0; i < 3; ++i) OK(frugal_table_find(observer, kNames[i], &seen[i]));
  AttackAll(3 + 1, 11 + 9 + 1);
  AttackMappings();
  for (int i = 0; i < 3; ++i) {
    Get(seen[i], &after);
    EXPECT_TRUE(before[i] == after) << kNames[i];
  }
  step(1);
  OK(frugal_close(observer));
  OK(frugal_close(e));
  EXPECT_EQ(0, controller.end(SIGTERM));
}

// Memory of tables that grow and are dropped: it comes, is counted, and goes, sealed as it is.
TEST(Fence, TablesComeAndGo) {
  const Folder folder;
  ControllerProgram controller(folder.address());
  ASSERT_TRUE(controller.serves());
  frugal_config c = FRUGAL_CONFIG_INIT;
  const std::string address = folder.address();
  c.service = address.c_str();
  c.host_bytes = uint64_t{160} << 20;
  frugal_engine* e;
  OK(frugal_open(&c, &e));
  std::vector<uint64_t> keys(kNeverMs);
  std::vector<float> rows(keys.size() * kDim, 1.0f);
  [[maybe_unused]] long low = 0;  // a sanitizer has memory of its own
  for (int round = 0; round < 6; ++round) {
    frugal_table_config t = FRUGAL_TABLE_CONFIG_INIT;
    t.name = "comes and goes";
    t.rows = 1000000;
    t.dim = kDim;
    t.optimizer.kind = FRUGAL_ADAGRAD;
    t.key_space = FRUGAL_HASHED;
    frugal_table* table;
    OK(frugal_table_create(e, &t, &table));
    frugal_table_info info{};
    info.struct_size = sizeof info;
    uint64_t grown = 0;
    for (uint64_t at = 0; at < 600000; at += keys.size()) {
      for (size_t i = 0; i < keys.size(); ++i) keys[i] = at + i;
      OK(frugal_put(table, keys.data(), keys.size(), 0, rows.data(), 0));
      OK(frugal_table_describe(table, &info));
      EXPECT_GE(info.memory_bytes, grown);
      grown = info.memory_bytes;
    }
    // Values and state, at least. What host_bytes allows is enough for one such table, and not for
    // two.
    EXPECT_GE(grown, 2 * 600000 * kDim * sizeof(float));
    EXPECT_LE(grown, c.host_bytes);
    OK(frugal_table_drop(table));
    const long kib = resident_kib(controller.pid());
    if (round == 0) low = kib;
#ifndef FRUGAL_SANITIZED  // which keep what was freed
    EXPECT_LT(kib, low + (16 << 10)) << "round " << round;
#endif
  }
  OK(frugal_close(e));
  EXPECT_EQ(0, controller.end(SIGTERM));
}

}  // namespace
