#include "process/channel.h"

#include <bit>
#include <new>
#include <utility>

#include "base/forked.h"

namespace frugal {
namespace {

constexpr uint64_t kMagic = 0x326c6e6843677246;  // "FrgChnl2"
constexpr size_t kPage = 4096;
constexpr size_t kMaxStaging = size_t{1} << 46;
constexpr size_t kReleaseBytes = Channel::kReleases * sizeof(uint64_t);

struct Up {
  RingEnd requests;  // written
  RingEnd answers;   // read
  RingEnd releases;  // read
  std::atomic<uint64_t> counters[Channel::kCounters];
};
struct Down {
  uint64_t magic, ring_bytes, staging_bytes;  // never change
  RingEnd requests;                           // read
  RingEnd answers;                            // written
  RingEnd releases;                           // written
};
static_assert(sizeof(Up) <= kPage && sizeof(Down) <= kPage);

// The layout of regions. Up: a page of ends, the ring. Down: a page, releases, the ring.
struct Layout {
  explicit Layout(size_t ring)
      : up_bytes(in_huge_pages(kPage + ring)),
        down_ring(kPage + kReleaseBytes),
        down_bytes(in_huge_pages(down_ring + ring)) {}
  size_t up_bytes, down_ring, down_bytes;
};

bool size_valid(uint64_t ring) {
  return std::has_single_bit(ring) && ring >= kPage && ring <= kMaxRing;
}

const char kBroken[] = "cannot be talked to: a call timed out in the middle of a message";

}  // namespace

Channel::Channel(bool controller)
    : controller_(controller), link_(controller ? "the trainer process" : "the controller") {}

Channel::~Channel() {
  os_release(&up_);
  os_release(&down_);
  os_release(&own_);
}

Status StagingMemory::make(size_t bytes, std::shared_ptr<RegionPublisher> region_publisher,
                           std::shared_ptr<StagingMemory>* out) {
  if (bytes > kMaxStaging)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "%zu bytes of staging memory: it is at most 64 TiB",
                bytes);
  auto m = std::allocate_shared<StagingMemory>(HeapAllocator<StagingMemory>());
  Status made;
  // A forked child that kept it would keep the memory.
  ForkedDescriptors::open([&] {
    made = os_reserve_to_read(in_huge_pages(bytes), &m->mapping_);
    return m->mapping_.fd;
  });
  FRUGAL_TRY(made);
  m->region_publisher_ = std::move(region_publisher);
  *out = std::move(m);
  return FRUGAL_OK;
}

StagingMemory::~StagingMemory() {
  if (shm_address_ != kNoShmAddress) region_publisher_->go(shm_address_);
  ForkedDescriptors::close(std::exchange(mapping_.fd, -1));
  os_release(&mapping_);
}

Status StagingMemory::show() {
  if (!sealed_) FRUGAL_TRY(os_seal(mapping_));
  sealed_ = true;
  return shm_address_ == kNoShmAddress && region_publisher_
             ? region_publisher_->come(mapping_, &shm_address_, true)
             : FRUGAL_OK;
}

Status Channel::create(size_t ring_bytes, std::shared_ptr<StagingMemory> staging,
                       std::unique_ptr<Channel>* out, uint64_t start) {
  if (!size_valid(ring_bytes))
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "a channel with rings of %zu bytes: a ring has a power of two from 4 KiB to 1 GiB",
                ring_bytes);
  const Layout layout(ring_bytes);
  std::unique_ptr<Channel> c(new Channel(true));
  FRUGAL_TRY(os_reserve(layout.up_bytes, true, &c->up_, true));
  FRUGAL_TRY(os_reserve(layout.down_bytes, true, &c->down_));
  FRUGAL_TRY(os_commit(c->up_, 0, kPage + ring_bytes));
  // Nothing is released where there is no staging memory.
  if (!staging) FRUGAL_TRY(os_commit(c->down_, 0, kPage));
  const size_t from = staging ? 0 : layout.down_ring;
  FRUGAL_TRY(os_commit(c->down_, from, layout.down_ring + ring_bytes - from));
  Up* up = new (c->up_.base) Up{};
  Down* down = new (c->down_.base) Down{};
  for (RingEnd* end : {&up->requests, &up->answers, &down->requests, &down->answers})
    end->count.store(start);
  // A whole number of entries: they do not wrap.
  for (RingEnd* end : {&up->releases, &down->releases}) end->count.store(start & ~uint64_t{7});
  down->magic = kMagic;
  down->ring_bytes = ring_bytes;
  down->staging_bytes = staging ? staging->mapping().bytes : 0;
  FRUGAL_TRY(os_make_read_only(c->up_));
  if (staging) {
    c->staging_bytes_ = staging->mapping().bytes;
    c->staging_ = staging->mapping().base;
    c->lent_ = std::move(staging);
  }
  c->connect(ring_bytes);
  *out = std::move(c);
  return FRUGAL_OK;
}

Status Channel::attach(int up_fd, int down_fd, int staging_fd, std::unique_ptr<Channel>* out) {
  std::unique_ptr<Channel> c(new Channel(false));
  // The caller owns the descriptors until all has succeeded.
  struct Lent {
    Channel* c;
    ~Lent() {
      if (c) c->up_.fd = c->down_.fd = c->own_.fd = -1;
    }
  } lent{c.get()};
  FRUGAL_TRY(os_map_shared(up_fd, true, &c->up_));
  FRUGAL_TRY(os_map_shared(down_fd, false, &c->down_));
  if (staging_fd >= 0) FRUGAL_TRY(os_map_shared(staging_fd, true, &c->own_));
  // The smallest region has 2 MiB: the page can be read.
  const Down* down = reinterpret_cast<const Down*>(c->down_.base);
  const uint64_t magic = down->magic, ring = down->ring_bytes, staging = down->staging_bytes;
  if (magic != kMagic || !size_valid(ring) || staging != c->own_.bytes ||
      Layout(ring).up_bytes != c->up_.bytes || Layout(ring).down_bytes != c->down_.bytes)
    return fail(
        FRUGAL_ERR_INVALID_ARGUMENT,
        "the shared memory is no channel of this version of the library; the controller and "
        "the trainer processes must use the same");
  c->staging_bytes_ = staging;
  c->staging_ = c->own_.base;
  c->connect(ring);
  lent.c = nullptr;
  *out = std::move(c);
  return FRUGAL_OK;
}

void Channel::connect(size_t ring_bytes) {
  release_mutex_.assert_held();  // no other thread has the channel yet
  Up* up = reinterpret_cast<Up*>(up_.base);
  Down* down = reinterpret_cast<Down*>(down_.base);
  const Layout layout(ring_bytes);
  char* requests = up_.base + kPage;
  char* answers = down_.base + layout.down_ring;
  char* releases = down_.base + kPage;
  if (controller_) {
    sender_ = RingWriter(&link_, &down->answers, &up->answers, answers, ring_bytes);
    receiver_ = RingReader(&link_, &down->requests, &up->requests, requests, ring_bytes);
    releaser_ = RingWriter(&link_, &down->releases, &up->releases, releases, kReleaseBytes);
  } else {
    sender_ = RingWriter(&link_, &up->requests, &down->requests, requests, ring_bytes);
    receiver_ = RingReader(&link_, &up->answers, &down->answers, answers, ring_bytes);
    released_ = RingReader(&link_, &up->releases, &down->releases, releases, kReleaseBytes);
  }
}

Status Channel::send(const Header& header, const Piece* pieces, size_t count, uint64_t until) {
  Header h = header;
  h.payload = 0;
  for (size_t i = 0; i < count; ++i) h.payload += pieces[i].bytes;
  const uint64_t total = h.payload + sizeof h;
  FRUGAL_TRY(sender_.wait(total <= sender_.capacity() / 4 ? total : sizeof h, until));
  Status s = sender_.write(&h, sizeof h, until);
  for (size_t i = 0; i < count && s == FRUGAL_OK; ++i)
    s = sender_.write(pieces[i].data, pieces[i].bytes, until);
  if (s == FRUGAL_ERR_TIMEOUT) link_.end(kBroken);
  if (s == FRUGAL_OK) sender_.publish();
  return s;
}

Status Channel::receive(Header* out, uint64_t until) {
  if (left_ > 0) FRUGAL_TRY(skip(left_, until));
  const uint64_t began = now_ns();
  FRUGAL_TRY(receiver_.wait(sizeof *out, until));
  waited_ns_ = now_ns() - began;
  FRUGAL_TRY(receiver_.read(out, sizeof *out, until));
  left_ = out->payload;
  if (left_ == 0) receiver_.publish();
  return FRUGAL_OK;
}

Status Channel::read(void* out, uint64_t bytes, uint64_t until) {
  if (bytes > left_) return link_.refuse("broke the protocol: a message is shorter than it says");
  Status s = receiver_.read(out, bytes, until);
  if (s == FRUGAL_OK && (left_ -= bytes) == 0) receiver_.publish();
  if (s == FRUGAL_ERR_TIMEOUT) link_.end(kBroken);
  return s;
}

Status Channel::commit_staging(uint64_t offset, uint64_t bytes) {
  if (offset > staging_bytes_ || bytes > staging_bytes_ - offset)
    return fail(FRUGAL_ERR_INTERNAL, "staging memory ends before %llu",
                static_cast<unsigned long long>(offset + bytes));
  return bytes ? os_commit(own_, offset, bytes) : FRUGAL_OK;
}

bool Channel::next_release(uint64_t* offset) {
  bool there = false;
  if (released_.has(sizeof *offset, &there) != FRUGAL_OK || !there ||
      released_.read(offset, sizeof *offset, 0) != FRUGAL_OK)
    return false;
  released_.publish();
  return true;
}

Status Channel::wait_release(uint64_t until) { return released_.wait(sizeof(uint64_t), until); }

std::atomic<uint64_t>& Channel::counter(size_t i) {
  return reinterpret_cast<Up*>(up_.base)->counters[i];
}

uint64_t Channel::counter_value(size_t i) const {
  return reinterpret_cast<const Up*>(up_.base)->counters[i].load(std::memory_order_acquire);
}

const char* Channel::staging_at(uint64_t offset, uint64_t bytes) const {
  if (offset > staging_bytes_ || bytes > staging_bytes_ - offset) return nullptr;
  return staging_ + offset;
}

void Channel::release(uint64_t offset) {
  Lock lock(release_mutex_);
  // No room: the trainer process has more ranges in use than it may.
  const Status s = releaser_.wait(sizeof offset, 0);
  if (s == FRUGAL_ERR_TIMEOUT)
    link_.end("broke the protocol: it has more staging memory in use than it may");
  if (s != FRUGAL_OK) return;
  if (releaser_.write(&offset, sizeof offset, 0) == FRUGAL_OK) releaser_.publish();
}

}  // namespace frugal
