// What the jobs of this folder are made of: keys and gradients that a step, a rank and a place
// determine, a digest, and the calls that they all make.
#pragma once
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "frugal.h"

namespace {

constexpr uint32_t kDim = 8, kRanks = 2;
constexpr uint64_t kDense = 400, kHashed = 900;

struct Digest {
  uint64_t value = 0xcbf29ce484222325u;
  void add(const void* data, size_t bytes) {
    const auto* p = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; ++i) value = (value ^ p[i]) * 0x100000001b3u;
  }
};

std::string said(const char* call, int32_t status) {
  frugal_error error;
  frugal_last_error(&error);
  return std::string(call) + ": " + frugal_status_name(status) + ": " + error.message;
}

struct Op {
  Op(frugal_table* table, std::vector<uint64_t> keys_in, float salt, size_t bags = 0)
      : keys(std::move(keys_in)) {
    const size_t out = bags ? bags : keys.size();
    rows.resize(out * kDim);
    grads.resize(out * kDim);
    for (size_t i = 0; i < grads.size(); ++i)
      grads[i] = salt + static_cast<float>(i % 97) * 0.0078125f;
    op = FRUGAL_OP_INIT;
    op.table = table;
    op.keys = keys.data();
    op.count = keys.size();
    op.rows_out = rows.data();
    op.grads = grads.data();
    if (!bags) return;
    for (size_t b = 0; b <= bags; ++b) offsets.push_back(b * keys.size() / bags);
    op.pooling = FRUGAL_POOL_MEAN;
    op.offsets = offsets.data();
    op.bags = bags;
  }
  Op(const Op&) = delete;
  std::vector<uint64_t> keys, offsets;
  std::vector<float> rows, grads;
  frugal_op op;
};

std::vector<uint64_t> keys_of(uint64_t step, uint32_t rank, uint64_t most, size_t n) {
  std::vector<uint64_t> keys(n);
  for (size_t i = 0; i < n; ++i) keys[i] = (step * 31 + rank * 17 + i * (i + 3)) % most;
  return keys;
}

// A job's own: makes a call until it succeeds. `named`: what it may return besides OUT_OF_MEMORY
// where something fails.
void again(const char* call, const std::function<int32_t()>& make,
           std::initializer_list<int32_t> named = {});
#define AGAIN(call, ...) \
  again(                 \
      #call, [&] { return call; }, ##__VA_ARGS__)

frugal_engine* g_engine = nullptr;

struct JobBase {
  frugal_table *dense = nullptr, *hashed = nullptr;
  frugal_trainer* trainers[kRanks] = {};

  static frugal_table* table(const char* name, int32_t key_space, uint64_t rows,
                             int32_t optimizer) {
    frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
    config.name = name;
    config.key_space = key_space;
    config.rows = rows;
    config.dim = kDim;
    config.init = FRUGAL_INIT_UNIFORM;
    config.init_a = -1;
    config.init_b = 1;
    config.optimizer.kind = optimizer;
    frugal_table* made = nullptr;
    AGAIN(frugal_table_create(g_engine, &config, &made), {FRUGAL_ERR_UNSUPPORTED});
    return made;
  }
  void join(uint32_t rank, uint32_t flags = 0, const char* device = nullptr) {
    frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
    config.rank = rank;
    config.device = device;
    config.cache_ratio = 0.25;
    config.flags = flags;
    AGAIN(frugal_trainer_create(g_engine, &config, &trainers[rank]));
  }
  void declare(uint64_t step, uint32_t r) {
    Op a(dense, keys_of(step, r, kDense, 120), 0), b(hashed, keys_of(step + 1, r, kHashed, 120), 0);
    frugal_op ops[] = {a.op, b.op};
    frugal_batch* batch = nullptr;
    AGAIN(frugal_prefetch(trainers[r], step, ops, 2, &batch));
    if (step % 4 != 3) return;  // and taken back, and declared again
    AGAIN(frugal_prefetch_cancel(trainers[r], batch));
    AGAIN(frugal_prefetch(trainers[r], step, ops, 2, nullptr));
  }
  static void look(frugal_table* t, uint64_t n, Digest* to) {
    std::vector<uint64_t> keys(n);
    for (uint64_t i = 0; i < n; ++i) keys[i] = i;
    std::vector<float> rows(n * 2 * kDim, 0);
    std::vector<uint8_t> found(n);
    AGAIN(frugal_get(t, keys.data(), n, FRUGAL_WITH_STATE, rows.data(), 0, found.data()));
    for (uint64_t i = 0; i < n; ++i)
      if (found[i]) to->add(&rows[i * 2 * kDim], 2 * kDim * sizeof(float));
    to->add(found.data(), n);
  }
};

}  // namespace
