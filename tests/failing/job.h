// What the jobs of this folder are made of: keys and gradients that a step, a rank and a place
// determine, and a digest.
#pragma once
#include <cstdint>
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

}  // namespace
