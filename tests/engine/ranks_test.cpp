// Which steps ranks may begin and have ended, which ranks are missing, late, lost or unresponsive,
// and what the messages say.
//
// Also: what an abort resets, and the step from which a cache serves.
#include "engine/ranks.h"

#include <random>
#include <thread>
#include <vector>

#include "support/inside.h"
#include "support/trainers.h"

namespace frugal::ranks_test {

struct RanksTest : testing::Test {
  ControlMutex mu;
  Ranks ranks{3, mu};
  TrainerRef join(uint32_t rank, bool cached = false, uint64_t recorded = 0) {
    TrainerRef t = trainer_of(rank);
    t->has_cache.store(cached);
    t->next_step = ranks.next_commit();
    ranks.join(t, recorded);
    return t;
  }
  void begin(const TrainerRef& t, uint64_t step) {
    ASSERT_OK(ranks.may_begin(*t, step));
    if (ranks.next_commit() == kNoStep) ranks.start(step);
    ranks.begin(*t, step);
  }
  void end(const TrainerRef& t) { ranks.end(*t); }
  bool ended(uint64_t step) {
    present = false;
    return ranks.ended(step, &present);
  }
  bool present = false;
  String why;
};

TEST_F(RanksTest, TheFirstStepIsAnyAndTheSameForAll) {
  const TrainerRef a = join(0), b = join(1);
  EXPECT_EQ(ranks.next_commit(), kNoStep);
  EXPECT_EQ(ranks.soonest(), 0u);
  EXPECT_EQ(ranks.step_again(), "the first step");
  ASSERT_OK(ranks.may_begin(*b, 7));
  begin(a, 40);
  EXPECT_EQ(ranks.next_commit(), 40u);
  EXPECT_EQ(ranks.committed(), kNoStep);
  EXPECT_EQ(ranks.begun(), 41u);
  EXPECT_EQ(ranks.may_begin(*b, 7), FRUGAL_ERR_STEP_ORDER);
  EXPECT_EQ(LastMessage(), "rank 1 must begin step 40 now, not 7");
  EXPECT_EQ(ranks.may_begin(*a, 41), FRUGAL_ERR_STEP_ORDER);
  EXPECT_EQ(LastMessage(), "rank 0 is inside step 40: end or abort it first");
  begin(b, 40);
  end(b);
  EXPECT_EQ(ranks.may_begin(*b, 40), FRUGAL_ERR_STEP_ORDER);
  ASSERT_OK(ranks.may_begin(*b, 41));
}

// Visits are without the mutex: a trainer may leave meanwhile.
TEST_F(RanksTest, ThoseWhoAreThere) {
  const TrainerRef a = join(0), c = join(2);
  EXPECT_EQ(ranks.at(2), c);
  EXPECT_EQ(ranks.at(1), nullptr);
  EXPECT_EQ(ranks.those([](const Trainer&) { return true; }), (Vector<TrainerRef>{a, c}));
  EXPECT_EQ(ranks.those([](const Trainer& t) { return t.rank != 0; }), Vector<TrainerRef>{c});
  std::vector<uint32_t> met;
  met.reserve(3);
  HeapCount count;
  ranks.each([&](Trainer& t) {
    met.push_back(t.rank);
    ranks.leave(t);
  });
  EXPECT_EQ(count.so_far(), 0);
  EXPECT_EQ(met, (std::vector<uint32_t>{0, 2}));
  EXPECT_EQ(ranks.at(0), nullptr);
  ranks.each([](Trainer&) { FAIL() << "no trainer has joined"; });
}

TEST_F(RanksTest, AStepIsEndedWhenAllHaveJoinedAndNobodyIsLate) {
  const TrainerRef a = join(0), b = join(1);
  begin(a, 0);
  EXPECT_FALSE(ended(0));
  end(a);
  begin(b, 0);
  end(b);
  EXPECT_FALSE(ended(0)) << "rank 2 has not joined";
  EXPECT_EQ(ranks.late_ranks(0), "2 (not joined)");
  const TrainerRef c = join(2);
  EXPECT_EQ(c->next_step, 0u);
  EXPECT_EQ(ranks.late_ranks(0), "2");
  EXPECT_FALSE(ranks.all_begun(0));
  begin(c, 0);
  EXPECT_TRUE(ranks.all_begun(0));
  EXPECT_FALSE(ended(0)) << "rank 2 is inside of it";
  EXPECT_EQ(ranks.some_ended(0), "step 0 is ended by some ranks, and not by rank 2");
  end(c);
  EXPECT_TRUE(ended(0) && present);
  EXPECT_FALSE(ended(1));
  EXPECT_EQ(ranks.some_ended(0), "step 0 is not committed yet");
  ranks.commit(0);
  EXPECT_EQ(ranks.next_commit(), 1u);
}

TEST_F(RanksTest, NobodyWaitsForWhoHasLeft) {
  const TrainerRef a = join(0), b = join(1), c = join(2);
  for (const TrainerRef& t : {a, b, c}) begin(t, 5);
  for (const TrainerRef& t : {a, b}) end(t);
  ranks.leave(*c);
  EXPECT_TRUE(ended(5) && present);
  EXPECT_TRUE(ranks.all_begun(5));
  for (const TrainerRef& t : {a, b}) ranks.leave(*t);
  EXPECT_TRUE(ended(5));
  EXPECT_FALSE(present);
}

TEST_F(RanksTest, NobodyGoesOnWithoutWhoIsLost) {
  const TrainerRef a = join(0), b = join(1), c = join(2);
  for (const TrainerRef& t : {a, b}) {
    begin(t, 5);
    end(t);
  }
  EXPECT_EQ(ranks.lost(), kNoRank);
  ranks.lose(2);
  EXPECT_EQ(ranks.lost(), 2u);
  ranks.leave(*c);
  EXPECT_EQ(ranks.lost(), 2u);
  EXPECT_FALSE(ended(5));
  const TrainerRef again = join(2);
  EXPECT_EQ(ranks.lost(), kNoRank);
  EXPECT_EQ(again->next_step, 5u);
  EXPECT_FALSE(ended(5));
  begin(again, 5);
  end(again);
  EXPECT_TRUE(ended(5));
}

TEST_F(RanksTest, RanksThatAreApartAreTold) {
  const TrainerRef a = join(0), b = join(1), c = join(2);
  EXPECT_TRUE(ranks.between(&why));
  begin(a, 0);
  EXPECT_FALSE(ranks.any_behind(0));
  EXPECT_TRUE(ranks.inside(&why));
  EXPECT_EQ(why, "rank 0 is inside step 0");
  EXPECT_FALSE(ranks.between(&why));
  EXPECT_EQ(why, "rank 0 is inside step 0");
  end(a);
  EXPECT_FALSE(ranks.any_behind(1)) << "a rank that has begun no step is not late";
  EXPECT_FALSE(ranks.between(&why));
  EXPECT_EQ(why, "step 0 is ended by some ranks, and not by rank 1, 2");
  for (int i = 0; i < 2; ++i) {
    begin(c, i);
    end(c);
  }
  EXPECT_TRUE(ranks.inside(&why)) << "although a rank between them has begun no step";
  EXPECT_EQ(why, "step 1 is ended by some ranks, and not by rank 0, 1");
  begin(b, 0);
  EXPECT_TRUE(ranks.any_behind(1));
  end(b);
  EXPECT_FALSE(ranks.any_behind(1));
  EXPECT_TRUE(ranks.inside(&why));
  EXPECT_EQ(why, "step 1 is ended by some ranks, and not by rank 0, 1");
  EXPECT_TRUE(ended(0));
  ranks.commit(0);
  for (const TrainerRef& t : {a, b}) {
    begin(t, 1);
    end(t);
  }
  EXPECT_FALSE(ranks.inside(&why));
  EXPECT_FALSE(ranks.between(&why));
  EXPECT_EQ(why, "step 1 is not committed yet");
  ranks.commit(1);
  EXPECT_TRUE(ranks.between(&why));
}

TEST_F(RanksTest, UndoneStepsAreBegunAgain) {
  const TrainerRef a = join(0), b = join(1), c = join(2);
  for (const TrainerRef& t : {a, b, c}) {
    begin(t, 3);
    end(t);
  }
  ranks.commit(3);
  begin(a, 4);
  end(a);
  begin(a, 5);
  begin(b, 4);
  EXPECT_EQ(ranks.begun(), 6u);
  a->refresh.begin_refresh();
  a->refresh.end_refresh(5);
  EXPECT_TRUE(a->refresh.may_plan(6));
  for (const TrainerRef& t : {a, b, c}) ranks.undo(*t);
  ranks.undone();
  EXPECT_EQ(ranks.begun(), 4u);
  EXPECT_EQ(ranks.step_again(), "step 4 again");
  for (const TrainerRef& t : {a, b, c}) {
    EXPECT_FALSE(t->in_step.load());
    EXPECT_EQ(t->next_step, 4u);
    EXPECT_FALSE(t->refresh.may_plan(6) || t->refresh.may_plan(4));
  }
  EXPECT_EQ(ranks.check_inside(*a), FRUGAL_ERR_NOT_IN_STEP);
  a->lost_peer.store(1);
  EXPECT_EQ(ranks.check_inside(*a), FRUGAL_ERR_PEER_LOST);
  EXPECT_EQ(LastMessage(), "the process of rank 1 is gone and the step undone: begin step 4 again");
  begin(a, 4);
  ASSERT_OK(ranks.check_inside(*a));
  EXPECT_EQ(a->lost_peer.load(), kNoRank);
  ranks.begin_again(*a);
  EXPECT_FALSE(a->in_step.load());
  ASSERT_OK(ranks.may_begin(*a, 4));
}

// Each count equals that of a scan of all ranks, where ranks begin, end, undo, come and go.
TEST(RanksModel, CountsAsByLookingAtAllRanks) {
  constexpr uint32_t kRanks = 5;
  ControlMutex mu;
  Ranks ranks(kRanks, mu);
  std::mt19937 random(23);
  std::vector<TrainerRef> here(kRanks);
  std::vector<bool> joined(kRanks), lost(kRanks);
  size_t committed = 0, behind = 0, undone = 0, empty = 0;
  for (int i = 0; i < 100'000; ++i) {
    const uint32_t r = random() % kRanks;
    TrainerRef& t = here[r];
    const uint64_t next = ranks.next_commit();
    const uint32_t what = random() % 200;
    if (!t) {
      if (what > 100) continue;
      t = trainer_of(r);
      t->next_step = next;
      ranks.join(t, 0);
      joined[r] = true;
      lost[r] = false;
    } else if (what == 0) {
      const bool all = random() % 2, loses = random() % 2;
      for (uint32_t o = 0; o < kRanks; ++o) {
        if (!here[o] || (!all && o != r)) continue;
        if (o == r && loses) {
          ranks.lose(r);
          lost[r] = true;
          joined[r] = false;
        }
        ranks.leave(*here[o]);
        here[o] = nullptr;
      }
    } else if (what == 1) {
      for (const TrainerRef& o : here)
        if (o) ranks.undo(*o);
      ranks.undone();
      ++undone;
    } else if (!t->in_step) {
      const uint64_t step = t->next_step != kNoStep ? t->next_step : next != kNoStep ? next : 7;
      if (next != kNoStep && step > next + 4) continue;
      if (next == kNoStep) ranks.start(step);
      ranks.begin(*t, step);
    } else {
      what < 10 ? ranks.begin_again(*t) : ranks.end(*t);
    }
    const auto first_lost = std::find(lost.begin(), lost.end(), true);
    ASSERT_EQ(ranks.lost(), first_lost == lost.end() ? kNoRank : first_lost - lost.begin());
    const bool any = std::any_of(here.begin(), here.end(), [](const auto& o) { return o; });
    empty += !any;
    for (uint64_t step = ranks.soonest(); step < ranks.soonest() + 7; ++step) {
      bool all_ended = true, all_begun = true, any_behind = false;
      for (uint32_t o = 0; o < kRanks; ++o) {
        const bool begun = here[o] ? here[o]->next_step != kNoStep : joined[o];
        const bool ends = here[o] && begun && here[o]->in_step && here[o]->step <= step;
        const bool begins = here[o] && begun && here[o]->next_step <= step;
        all_begun &= begun && !begins;
        all_ended &= begun && !begins && !ends;
        any_behind |=
            here[o] && begun && (here[o]->in_step ? here[o]->step : here[o]->next_step) < step;
      }
      bool present;
      ASSERT_EQ(ranks.ended(step, &present), all_ended) << i;
      ASSERT_EQ(present, any) << i;
      ASSERT_EQ(ranks.all_begun(step), all_begun) << i;
      ASSERT_EQ(ranks.any_behind(step), any_behind) << i;
      behind += any_behind;
    }
    bool present;
    while (ranks.next_commit() != kNoStep && ranks.ended(ranks.next_commit(), &present) &&
           present) {
      ranks.commit(ranks.next_commit());
      ++committed;
    }
  }
  EXPECT_TRUE(committed > 1000 && behind > 1000 && undone > 100 && empty > 0)
      << committed << " " << behind << " " << undone << " " << empty;
}

TEST(SilenceTest, IsALittleLessThanTheTimeOut) {
  constexpr uint64_t kMs = 1'000'000;
  const auto is = [](int64_t timeout_ms, uint64_t limit, uint64_t look) {
    const Liveness s = Liveness::of(timeout_ms);
    EXPECT_EQ(limit, s.limit);
    EXPECT_EQ(look, s.look());
    EXPECT_EQ(3 * look, s.gap);
  };
  is(0, 0, 50 * kMs);
  is(80, 70 * kMs, 50 * kMs);
  is(4100, 4000 * kMs, 500 * kMs);
  is(60'000, 59'900 * kMs, 1000 * kMs);
  is(-1, UINT64_MAX, 1000 * kMs);
}

// A trainer that made no call for as long as another has waited, and is in none, is lost: once.
TEST_F(RanksTest, WhoSaysNothingIsLost) {
  const TrainerRef a = join(0), b = join(1), c = join(2);
  begin(a, 0);
  end(a);
  std::vector<uint32_t> told;
  const uint64_t long_ago = now_ns() - 1'000'000'000;
  // c is a thread of this process.
  for (const TrainerRef& t : {a, b}) t->process.heard.store(long_ago);
  ranks.note_awaited(0);
  const auto find = [&](uint64_t limit) { return ranks.find_unresponsive({limit, UINT64_MAX}); };
  EXPECT_FALSE(find(0)) << "no callback is set";
  ranks.on_unresponsive([&](const TrainerRef& t) { told.push_back(t->rank); });
  EXPECT_FALSE(find(3'600'000'000'000));
  ranks.note_awaited(1);
  EXPECT_FALSE(find(0)) << "it is another step that is waited for";
  ranks.note_awaited(0);
  {
    Lock in_a_call(b->call_mu);
    std::thread([&] { EXPECT_FALSE(find(0)); }).join();
  }
  EXPECT_FALSE(ranks.find_unresponsive({1, 0})) << "no thread had checked for a while";
  EXPECT_TRUE(find(0));
  EXPECT_EQ(told, std::vector<uint32_t>{1});
  EXPECT_EQ(ranks.lost(), 1u);
  EXPECT_TRUE(b->closing.load());
  EXPECT_EQ(b->lost_peer.load(), 1u);
  EXPECT_FALSE(find(0));
}

TEST_F(RanksTest, ACacheServesFromTheFirstStepWhoseDeclarationsAreLinked) {
  const TrainerRef a = join(0);
  begin(a, 10);
  end(a);
  EXPECT_FALSE(ranks.caches_exist());
  const TrainerRef b = join(1, true, 13);
  EXPECT_TRUE(ranks.caches_exist());
  EXPECT_TRUE(ranks.has_cache(1));
  EXPECT_FALSE(ranks.has_cache(0) || ranks.has_cache(2));
  EXPECT_EQ(b->refresh.from(), 13u) << "ranks that have left had ended steps before";
  const TrainerRef c = join(2, true, 20);
  EXPECT_EQ(c->refresh.from(), 13u) << "as the first";
  for (int twice = 0; twice < 2; ++twice) ranks.leave(*b);
  EXPECT_TRUE(ranks.caches_exist());
  ranks.leave(*c);
  EXPECT_FALSE(ranks.caches_exist());
  begin(a, 11);
  EXPECT_EQ(join(1, true, 5)->refresh.from(), 12u);
}

TEST_F(RanksTest, CommittedUpdatesWaitForTheCachesThatThereIsRoomFor) {
  const TrainerRef a = join(0, true), b = join(1);
  const UpdateRef update = std::allocate_shared<StepUpdate>(HeapAllocator<StepUpdate>());
  const TableRef table = std::allocate_shared<Table>(HeapAllocator<Table>());
  ranks.expect_backlog(2);
  const TrainerRef late = join(2, true);
  HeapCount count;
  ranks.add_backlog(update, table);
  ranks.add_backlog(update, table);
  EXPECT_EQ(count.so_far(), 0);
  ASSERT_EQ(a->backlog.size(), 2u);
  EXPECT_EQ(a->backlog[1].update, update);
  EXPECT_EQ(a->backlog[1].table, table);
  EXPECT_TRUE(b->backlog.empty() && late->backlog.empty());
  ranks.leave(*a);
  EXPECT_TRUE(a->backlog.empty());
}

}  // namespace frugal::ranks_test
