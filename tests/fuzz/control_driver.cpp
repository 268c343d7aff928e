// Runs control_fuzz without a fuzzer: control_fuzz COUNT [FIRST] [FOLDER]. Inputs are random, or
// what a real client sends, changed in some places. With FOLDER, what the client sends is written
// there, as the first input of a fuzzer. Prints the seed before an input is tried.
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "fuzz/control_service.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

// What a client sends for one call of each kind, by way of a socket between it and the service.
Bytes record() {
  char folder[] = "/tmp/frugal-fuzz-XXXXXX";
  if (!mkdtemp(folder)) std::abort();
  const std::string address = std::string(folder) + "/socket";
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::strcpy(name.sun_path, address.c_str());
  int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bind(listener, reinterpret_cast<sockaddr*>(&name), sizeof name) != 0 ||
      listen(listener, 1) != 0)
    std::abort();
  Bytes sent;
  std::thread between([&] {
    int client = accept(listener, nullptr, nullptr), ends[2];
    if (client < 0 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) std::abort();
    frugal::fuzzed_service().adopt(ends[0]);
    for (;;) {
      pollfd both[] = {{client, POLLIN, 0}, {ends[1], POLLIN, 0}};
      poll(both, 2, -1);
      uint8_t bytes[4096];
      if (both[0].revents) {
        ssize_t n = read(client, bytes, sizeof bytes);
        if (n <= 0) break;
        sent.insert(sent.end(), bytes, bytes + n);
        if (write(ends[1], bytes, static_cast<size_t>(n)) != n) break;
      }
      if (both[1].revents) {
        ssize_t n = read(ends[1], bytes, sizeof bytes);  // descriptors are lost here
        if (n <= 0 || write(client, bytes, static_cast<size_t>(n)) != n) break;
      }
    }
    close(client);
    close(ends[1]);
  });
  {
    std::unique_ptr<frugal::ControlClient> client;
    if (frugal::ControlClient::connect(address.c_str(), 60000, &client) != FRUGAL_OK) std::abort();
    frugal::OpenReply opened;
    frugal::TableReply table;
    frugal::JoinReply joined;
    frugal_stats stats;
    int32_t health;
    uint64_t step;
    frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
    config.name = "a table";
    client->ping(60000);
    client->open(FRUGAL_CONFIG_INIT, 60000, &opened);
    client->create_table(config, 60000, &table);
    client->find_table("a table", 60000, &table);
    client->drop_table(1, 60000);
    client->join(FRUGAL_TRAINER_CONFIG_INIT, 60000, &joined);
    client->leave(1, false, 60000);
    client->stats(60000, &stats);
    client->health(60000, &health);
    client->committed(60000, &step);
  }
  between.join();
  close(listener);
  unlink(address.c_str());
  rmdir(folder);
  return sent;
}

Bytes changed(Bytes bytes, std::mt19937_64& random) {
  const auto address = [&] { return random() % bytes.size(); };
  for (uint64_t n = 1 + random() % 4; n > 0 && bytes.size() > 16; --n) {
    switch (random() % 6) {
      case 0:
        bytes[address()] ^= static_cast<uint8_t>(1u << random() % 8);
        break;
      case 1:
        bytes[address()] = static_cast<uint8_t>(random());
        break;
      case 2: {  // a word is another number
        const uint64_t word = random() % 2 ? random() : random() % 64;
        std::memcpy(&bytes[address() / 8 * 8 % (bytes.size() - 8)], &word, 8);
        break;
      }
      case 3:
        bytes.resize(address());
        break;
      case 4: {  // words come twice
        const size_t from = address() / 8 * 8;
        Bytes copy(bytes.begin() + static_cast<long>(from), bytes.end());
        bytes.insert(bytes.begin() + static_cast<long>(from), copy.begin(), copy.end());
        break;
      }
      default: {  // words are missing
        const size_t from = address() / 8 * 8, count = 8 * (1 + random() % 8);
        bytes.erase(bytes.begin() + static_cast<long>(from),
                    bytes.begin() + static_cast<long>(std::min(from + count, bytes.size())));
      }
    }
  }
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000;
  const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  const Bytes good = record();
  if (argc > 3) {
    std::FILE* f = std::fopen((std::string(argv[3]) + "/client").c_str(), "wb");
    if (!f || std::fwrite(good.data(), 1, good.size(), f) != good.size() || std::fclose(f) != 0)
      return 2;
  }
  const uint64_t before = frugal::fuzzed_handler().calls;
  LLVMFuzzerTestOneInput(good.data(), good.size());
  for (uint64_t seed = first; seed < first + count; ++seed) {
    std::printf("\r%llu", static_cast<unsigned long long>(seed));
    std::fflush(stdout);
    std::mt19937_64 random(seed);
    Bytes bytes;
    if (seed % 4 == 0) {
      bytes.resize(random() % 3000);
      const uint64_t zeros = random() % 4;
      for (uint8_t& b : bytes) b = random() % 4 < zeros ? 0 : static_cast<uint8_t>(random());
    } else {
      bytes = changed(good, random);
    }
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  // The service replies as before, and the changed inputs reached its handler.
  const Bytes again = record();
  frugal::fuzzed_service().stop();
  const uint64_t reached = frugal::fuzzed_handler().calls - before;
  std::printf("\r%llu inputs, %llu calls made by them\n", static_cast<unsigned long long>(count),
              static_cast<unsigned long long>(reached));
  return again.size() == good.size() && reached > count ? 0 : 1;
}
