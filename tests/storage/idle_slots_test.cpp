// Of the slots without holders, the one that was released first agrees with a model.
#include "storage/idle_slots.h"

#include <algorithm>
#include <list>

#include "support/inside.h"
#include "support/random.h"

namespace frugal::idle_slots_test {

TEST(IdleSlots, TheOldestIsTheFirstThatWasLetGo) {
  IdleSlots idle;
  ASSERT_OK(idle.open(3, nullptr));
  for (uint32_t slot : {0, 1, 2}) ASSERT_OK(idle.ensure(slot));
  EXPECT_EQ(idle.size(), 0);
  idle.add(2);
  idle.add(0);
  idle.add(1);
  EXPECT_EQ(idle.oldest(), 2);
  idle.remove(2);
  EXPECT_EQ(idle.oldest(), 0);
  idle.add(2);
  EXPECT_EQ(idle.oldest(), 0) << "one that was held since is the newest";
  idle.remove(0);
  idle.remove(1);
  EXPECT_EQ(idle.oldest(), 2);
  EXPECT_EQ(idle.size(), 1);
  EXPECT_GT(idle.memory_bytes(), 0);
}

TEST(IdleSlots, BesideAModel) {
  constexpr uint32_t kPlaces = 40;
  Random random(1);
  IdleSlots idle;
  ASSERT_OK(idle.open(kPlaces, nullptr));
  for (uint32_t slot = 0; slot < kPlaces; ++slot) ASSERT_OK(idle.ensure(slot));
  std::list<uint32_t> model;
  for (int i = 0; i < 20000; ++i) {
    const uint32_t slot = static_cast<uint32_t>(random.below(kPlaces));
    const auto at = std::find(model.begin(), model.end(), slot);
    if (at == model.end()) {
      model.push_back(slot);
      idle.add(slot);
    } else {
      model.erase(at);
      idle.remove(slot);
    }
    ASSERT_EQ(idle.size(), model.size());
    if (!model.empty()) {
      ASSERT_EQ(idle.oldest(), model.front());
    }
  }
}

}  // namespace frugal::idle_slots_test
