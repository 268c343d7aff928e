// A gate's conditions: their order, what each reports, and how a waiting thread helps.
#include "engine/gate.h"

#include <algorithm>
#include <vector>

#include "support/inside.h"

namespace frugal::gate_test {

struct GateTest : testing::Test {
  bool closed[3] = {};
  int work[3] = {};  // units
  std::vector<int> looked;
  Gate gate;
  Gate::Pass pass;

  void SetUp() override {
    pass.step = 5;
    for (int i = 0; i < 3; ++i) {
      std::function<bool(const Gate::Pass&)> help;
      if (i != 0) help = [this, i](const Gate::Pass&) { return work[i]-- > 0; };
      gate.add(
          {1u << i,
           [this, i](Gate::Pass& p) {
             EXPECT_EQ(p.step, 5u);
             looked.push_back(i);
             return !closed[i];
           },
           [i](const Gate::Pass& p) { return text("%d of step %d", i, static_cast<int>(p.step)); },
           help});
    }
  }
};

TEST_F(GateTest, IsOpenWhenAllConditionsAre) {
  EXPECT_TRUE(gate.open(&pass));
  EXPECT_EQ(looked, (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(pass.waited, 0u);
  EXPECT_EQ(gate.what(pass), "nothing any more");
  std::fill_n(work, 3, 9);
  EXPECT_FALSE(gate.help(pass));
  for (uint32_t bits = 1; bits < 8; ++bits) {
    for (uint32_t i = 0; i < 3; ++i) closed[i] = bits >> i & 1;
    EXPECT_FALSE(gate.open(&pass)) << bits;
  }
}

TEST_F(GateTest, TheFirstClosedConditionIsTold) {
  closed[1] = closed[2] = true;
  EXPECT_FALSE(gate.open(&pass));
  EXPECT_EQ(looked, (std::vector<int>{0, 1}));
  EXPECT_EQ(gate.what(pass), "1 of step 5");
  closed[1] = false;
  EXPECT_FALSE(gate.open(&pass));
  EXPECT_EQ(gate.what(pass), "2 of step 5");
  EXPECT_EQ(pass.waited, 6u);  // each that it has waited for
}

TEST_F(GateTest, WhoWaitsHelpsFromTheClosedConditionOn) {
  closed[0] = true;
  work[1] = 1;
  work[2] = 2;
  EXPECT_FALSE(gate.open(&pass));
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(gate.help(pass));
  EXPECT_FALSE(gate.help(pass));
  closed[0] = false;
  closed[2] = true;
  work[1] = 1;  // nothing waits for that
  work[2] = 0;
  EXPECT_FALSE(gate.open(&pass));
  EXPECT_FALSE(gate.help(pass));
  EXPECT_EQ(work[1], 1);
}

}  // namespace frugal::gate_test
