// Slabs of rows are committed, counted and pinned once, become visible to devices, and refuse what
// lacks memory.
#include "storage/slab.h"

#include <cstring>
#include <map>
#include <memory>

#include "support/inside.h"

namespace frugal::slab_test {

// A device that pins, or one that is not there yet, or has no room.
struct FakePinner : Pinner {
  Status pin(void* p, size_t bytes, bool* pinned) override {
    *pinned = there;
    if (there && room == 0) return fail(FRUGAL_ERR_OUT_OF_MEMORY, "no more can be pinned");
    if (!there) return FRUGAL_OK;
    --room;
    EXPECT_TRUE(pinned_now.emplace(p, bytes).second) << "pinned twice";
    return FRUGAL_OK;
  }
  void unpin(void* p) noexcept override {
    EXPECT_EQ(pinned_now.erase(p), 1u) << "it was not pinned";
  }
  bool there = true;
  int room = 1000;
  std::map<void*, size_t> pinned_now;
};

constexpr size_t kSlab = SlabArray::kSlab;

TEST(Slabs, SizesOfArrays) {
  EXPECT_EQ(SlabArray::slab_bytes(1, 1), 4096u);
  EXPECT_EQ(SlabArray::slab_bytes(4096, 1), 4096u);
  EXPECT_EQ(SlabArray::slab_bytes(4097, 1), 8192u);
  EXPECT_EQ(SlabArray::slab_bytes(kHugePage / 2 - 4096, 1), kHugePage / 2 - 4096);
  EXPECT_EQ(SlabArray::slab_bytes(kHugePage / 16, 8), kHugePage) << "whole huge pages";
  EXPECT_EQ(SlabArray::slab_bytes(kHugePage + 1, 1), 2 * kHugePage);
  EXPECT_EQ(SlabArray::slab_bytes(kSlab / 8, 8), kSlab);
  EXPECT_EQ(SlabArray::slab_bytes(1000 * kSlab, 128), kSlab);
}

TEST(Slabs, AreCommittedOnce) {
  for (const bool shared : {false, true}) {
    MemoryBudget budget;
    {
      SlabArray a;
      ASSERT_OK(a.reserve(kSlab / 8 * 3, 8, shared, &budget));
      EXPECT_EQ(a.fd() >= 0, shared);
      EXPECT_EQ(a.stride(), 8u);
      EXPECT_FALSE(a.committed(0));
      ASSERT_OK(a.ensure(5, 0));
      EXPECT_EQ(a.committed_bytes(), 0u);
      const uint64_t slab = kSlab / 8;  // records
      ASSERT_OK(a.ensure(slab - 1, 1));
      EXPECT_TRUE(a.committed(0) && a.committed(slab - 1));
      EXPECT_FALSE(a.committed(slab));
      ASSERT_OK(a.ensure(slab - 1, 2));  // across the border
      EXPECT_TRUE(a.committed(slab));
      EXPECT_FALSE(a.committed(2 * slab));
      EXPECT_EQ(a.committed_bytes(), 2 * kSlab);
      std::memset(a.base() + kSlab - 8, 7, 16);
      ASSERT_OK(a.ensure(0, 2 * slab));
      EXPECT_EQ(a.base()[kSlab], 7) << "what there is stays";
      EXPECT_EQ(a.committed_bytes(), 2 * kSlab);
      EXPECT_EQ(budget.used.load(), 2 * kSlab);
    }
    EXPECT_EQ(budget.used.load(), 0u);
  }
}

TEST(Slabs, EmptyArrays) {
  SlabArray none, no_stride;
  ASSERT_OK(none.reserve(0, 8, false, nullptr));
  ASSERT_OK(no_stride.reserve(10, 0, false, nullptr));
  ASSERT_OK(no_stride.ensure(3, 2));
  EXPECT_FALSE(none.committed(0));
  bool any = true;
  ASSERT_OK(none.pin_next(&any));
  EXPECT_FALSE(any);
}

TEST(Slabs, MoreThanThereAreAddresses) {
  SlabArray a;
  EXPECT_EQ(a.reserve(UINT64_MAX / 2, 64, false, nullptr), FRUGAL_ERR_OUT_OF_MEMORY);
  EXPECT_EQ(a.base(), nullptr);
}

TEST(Slabs, MemoryThatIsRefused) {
  MemoryBudget budget;
  budget.limit = kSlab + kSlab / 2;
  SlabArray a;
  ASSERT_OK(a.reserve(2 * kSlab, 1, false, &budget));
  {
    SystemFails fails(1);
    EXPECT_EQ(a.ensure(0, 1), FRUGAL_ERR_OUT_OF_MEMORY);
    SlabArray other;
    os_test_fail_after(1);
    EXPECT_EQ(other.reserve(10, 1, false, nullptr), FRUGAL_ERR_OUT_OF_MEMORY);
  }
  EXPECT_EQ(budget.used.load(), 0u);
  EXPECT_FALSE(a.committed(0));
  ASSERT_OK(a.ensure(0, 1));
  EXPECT_EQ(a.ensure(kSlab, 1), FRUGAL_ERR_OUT_OF_MEMORY);
  EXPECT_NE(LastMessage().find("host_bytes"), std::string::npos) << LastMessage();
  EXPECT_FALSE(a.committed(kSlab));
  EXPECT_EQ(budget.used.load(), kSlab);
  // Without a budget only the system refuses memory.
  SlabArray free;
  ASSERT_OK(free.reserve(10, 1, false, nullptr));
  SystemFails fails(1);
  EXPECT_EQ(free.ensure(0, 1), FRUGAL_ERR_OUT_OF_MEMORY);
}

TEST(Slabs, ArePinnedWhenThereIsADevice) {
  auto pinner = std::make_shared<FakePinner>();
  {
    SlabArray a;
    ASSERT_OK(a.reserve(3 * kSlab, 1, false, nullptr, pinner));
    pinner->there = false;
    ASSERT_OK(a.ensure(0, 2 * kSlab));
    EXPECT_TRUE(pinner->pinned_now.empty());
    bool any = true;
    ASSERT_OK(a.pin_next(&any));
    EXPECT_FALSE(any) << "there is no device";
    pinner->there = true;
    ASSERT_OK(a.ensure(2 * kSlab, 1));  // new ones at once
    EXPECT_EQ(pinner->pinned_now.size(), 1u);
    ASSERT_OK(a.pin_next(&any));
    EXPECT_TRUE(any);
    ASSERT_OK(a.pin_next(&any));
    EXPECT_TRUE(any);
    EXPECT_EQ(pinner->pinned_now.size(), 3u);
    EXPECT_EQ(pinner->pinned_now.begin()->second, kSlab);
    ASSERT_OK(a.pin_next(&any));
    EXPECT_FALSE(any) << "all are";
    a.unpin();
    EXPECT_TRUE(pinner->pinned_now.empty());
    a.unpin();
    ASSERT_OK(a.pin_next(&any));
    EXPECT_TRUE(any);
  }
  EXPECT_TRUE(pinner->pinned_now.empty()) << "before the memory goes";
}

// A slab that cannot be pinned keeps its memory for the next call.
TEST(Slabs, ThatCannotBePinned) {
  auto pinner = std::make_shared<FakePinner>();
  MemoryBudget budget;
  SlabArray a;
  ASSERT_OK(a.reserve(kSlab, 1, false, &budget, pinner));
  pinner->room = 0;
  EXPECT_EQ(a.ensure(0, 1), FRUGAL_ERR_OUT_OF_MEMORY);
  EXPECT_FALSE(a.committed(0));
  EXPECT_EQ(budget.used.load(), kSlab);
  pinner->room = 1;
  ASSERT_OK(a.ensure(0, 1));
  EXPECT_TRUE(a.committed(0));
  EXPECT_EQ(budget.used.load(), kSlab) << "it is counted once";
  EXPECT_EQ(pinner->pinned_now.size(), 1u);
  a.unpin();
  pinner->room = 0;
  bool any = true;
  EXPECT_EQ(a.pin_next(&any), FRUGAL_ERR_OUT_OF_MEMORY);
}

TEST(Slabs, Swapped) {
  auto pinner = std::make_shared<FakePinner>();
  MemoryBudget budget;
  {
    SlabArray a, b;
    ASSERT_OK(a.reserve(kSlab, 1, false, &budget, pinner));
    ASSERT_OK(b.reserve(2 * kSlab, 2, true, &budget));
    ASSERT_OK(a.ensure(0, 1));
    ASSERT_OK(b.ensure(kSlab, 1));
    a.base()[0] = 1;
    a.swap(b);
    EXPECT_EQ(b.base()[0], 1);
    EXPECT_EQ(b.stride(), 1u);
    EXPECT_TRUE(b.committed(0));
    EXPECT_FALSE(a.committed(0));
    EXPECT_TRUE(a.committed(kSlab));
    EXPECT_GE(a.fd(), 0);
    b.unpin();
    EXPECT_TRUE(pinner->pinned_now.empty());
  }
  EXPECT_EQ(budget.used.load(), 0u);
}

}  // namespace frugal::slab_test
