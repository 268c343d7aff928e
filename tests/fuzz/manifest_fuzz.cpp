// Bytes to the reader of manifests: as they are, as a message in a right envelope, or as changes of
// a good message. It never crashes, and what it takes it also writes, and reads as the same.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "support/manifests.h"

namespace {

using frugal::Manifest;
using frugal::ManifestEnvelope;
using frugal::Vector;

constexpr uint64_t kSequence = 3;

void check(bool good) {
  if (!good) std::abort();
}

Vector<uint64_t> encoded(const Manifest& m) {
  Vector<uint64_t> words;
  check(encode_manifest(m, &words) == FRUGAL_OK);
  return words;
}

Vector<uint64_t> made(uint8_t how, const uint8_t* data, size_t size, size_t* bytes) {
  Vector<uint64_t> words;
  *bytes = size;
  if (how % 4 == 0) {
    words.resize((size + 7) / 8);
    if (size > 0) std::memcpy(words.data(), data, size);
    return words;
  }
  words = encoded(frugal::RandomManifest(how, 3)(kSequence));
  auto* message = reinterpret_cast<uint8_t*>(words.data()) + sizeof(ManifestEnvelope);
  if (how % 4 == 1) {
    words.resize((sizeof(ManifestEnvelope) + size + 7) / 8);
    message = reinterpret_cast<uint8_t*>(words.data()) + sizeof(ManifestEnvelope);
    if (size > 0) std::memcpy(message, data, size);
  } else {
    // A few bytes become others; then, of some inputs, many.
    const size_t most = words.size() * 8 - sizeof(ManifestEnvelope);
    for (size_t at = 0, left = how % 4 == 2 ? 3 : 100; at + 3 <= size && left > 0; at += 3, --left)
      message[(data[at] + size_t{256} * data[at + 1]) % most] = data[at + 2];
  }
  frugal::seal_manifest(&words);
  *bytes = words.size() * 8;
  return words;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return -1;
  size_t bytes;
  const Vector<uint64_t> words = made(data[0], data + 1, size - 1, &bytes);
  Manifest m;
  const frugal::Status status =
      frugal::decode_manifest("a manifest", kSequence, words.data(), bytes, &m);
  if (status != FRUGAL_OK) {
    check(status == FRUGAL_ERR_DAMAGED || status == FRUGAL_ERR_TOO_NEW ||
          status == FRUGAL_ERR_UNSUPPORTED);
    check(m.sequence == 0 && m.tables.empty());
    return -1;
  }
  check(frugal::manifest_fault(m).empty());
  const Vector<uint64_t> again = encoded(m);
  Manifest back;
  check(frugal::decode_manifest("a manifest", kSequence, again.data(), again.size() * 8, &back) ==
        FRUGAL_OK);
  check(frugal::ManifestText::of(back) == frugal::ManifestText::of(m));
  return 0;
}
