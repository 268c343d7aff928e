// Which keys of a table newer files have, in memory of a fixed size.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "arith/init.h"
#include "base/heap.h"

namespace frugal {

// Keys of a hashed table are counted in so many parts, each of which reads the columns anew.
constexpr uint64_t kMostParts = 16;

// A part of the keys of a table: for each, whether it was added. In memory of a fixed size.
class SeenKeys {
 public:
  explicit SeenKeys(size_t bytes) : most_words_(std::bit_floor(bytes / sizeof(uint64_t))) {}
  // `entries`: that add() may be called for. False: that is too many.
  bool open(bool dense, uint64_t rows, uint64_t entries) {
    dense_ = dense;
    full_ = false;
    bits_ = most_words_ * 64;
    const uint64_t most = dense ? bits_ : most_words_ / 8 * 5;  // a hash table is never full
    parts_ = std::max<uint64_t>(((dense ? rows : entries) + most - 1) / most, 1);
    if (!dense && parts_ > kMostParts) return false;
    uint64_t words = 1;
    if (dense)
      words = (std::min(rows, bits_) + 63) / 64;
    else
      while (words < most_words_ && words < entries * 2) words *= 2;
    if (words > words_.size()) {
      Vector<uint64_t>().swap(words_);  // before there is a larger one
      words_.resize(words);
    }
    used_ = words;
    return true;
  }
  uint64_t parts() const { return parts_; }

  void begin(uint64_t part) {
    part_ = part;
    std::fill(words_.begin(), words_.begin() + static_cast<ptrdiff_t>(used_), 0);
    zero_ = false;
    added_ = 0;
  }
  bool in_part(uint64_t key) const {
    if (dense_) return key / bits_ == part_;
    return parts_ == 1 ||
           static_cast<uint64_t>(static_cast<unsigned __int128>(arith::mix(key)) * parts_ >> 64) ==
               part_;
  }
  // Of a key of the part.
  bool has(uint64_t key) const {
    if (dense_) return words_[key % bits_ / 64] >> key % 64 & 1;
    return key == 0 ? zero_ : words_[word_of(key)] == key;
  }
  void add(uint64_t key) {
    if (dense_) {
      words_[key % bits_ / 64] |= uint64_t{1} << key % 64;
      return;
    }
    if (key == 0) {
      zero_ = true;
      return;
    }
    uint64_t& word = words_[word_of(key)];
    if (word == key) return;
    if (added_ + 1 == used_) {  // keys that a writer did not draw by chance
      full_ = true;
      return;
    }
    word = key;
    ++added_;
  }
  bool full() const { return full_; }

 private:
  size_t word_of(uint64_t key) const {
    size_t at = arith::mix(key) & (used_ - 1);
    while (words_[at] != 0 && words_[at] != key) at = (at + 1) & (used_ - 1);
    return at;
  }
  const uint64_t most_words_;  // a power of 2, at least 64
  bool dense_ = false, zero_ = false, full_ = false;
  uint64_t bits_ = 0, parts_ = 1, part_ = 0, used_ = 0, added_ = 0;
  Vector<uint64_t> words_;
};

}  // namespace frugal
