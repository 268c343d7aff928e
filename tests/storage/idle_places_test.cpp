// Of the slots without holders, the one that was released first agrees with a model.
#include "storage/idle_places.h"

#include <algorithm>
#include <list>

#include "support/inside.h"
#include "support/random.h"

namespace frugal::idle_places_test {

TEST(IdlePlaces, TheOldestIsTheFirstThatWasLetGo) {
  IdlePlaces idle;
  ASSERT_OK(idle.open(3, nullptr));
  for (uint32_t place : {0, 1, 2}) ASSERT_OK(idle.ensure(place));
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

TEST(IdlePlaces, BesideAModel) {
  constexpr uint32_t kPlaces = 40;
  Random random(1);
  IdlePlaces idle;
  ASSERT_OK(idle.open(kPlaces, nullptr));
  for (uint32_t place = 0; place < kPlaces; ++place) ASSERT_OK(idle.ensure(place));
  std::list<uint32_t> model;
  for (int i = 0; i < 20000; ++i) {
    const uint32_t place = static_cast<uint32_t>(random.below(kPlaces));
    const auto at = std::find(model.begin(), model.end(), place);
    if (at == model.end()) {
      model.push_back(place);
      idle.add(place);
    } else {
      model.erase(at);
      idle.remove(place);
    }
    ASSERT_EQ(idle.size(), model.size());
    if (!model.empty()) {
      ASSERT_EQ(idle.oldest(), model.front());
    }
  }
}

}  // namespace frugal::idle_places_test
