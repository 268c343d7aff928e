//! The engine's promise, tested through this crate: trainers in threads have bit for bit the result of one
//! thread that drives them one after the other.

use std::thread;

use frugal::*;

const RANKS: u32 = 4;
const STEPS: u64 = 40;
const LOOKAHEAD: u64 = 3;
const DIM: usize = 8;

/// Numbers that depend only on the arguments.
fn number(step: u64, rank: u32, place: u64) -> u64 {
    let mut z = (step << 32 | u64::from(rank) << 24 | place).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

fn keys(step: u64, rank: u32) -> Vec<u64> {
    // Few keys, so that ranks and steps share them.
    (0..64).map(|place| number(step, rank, place) % 200).collect()
}

struct Rank {
    trainer: Trainer,
    dense: Table,
    hashed: Table,
    declared: Vec<Option<Batch>>,
    /// All rows that were looked up.
    seen: Vec<f32>,
}

impl Rank {
    fn declare(&mut self, step: u64) {
        let keys = keys(step, self.trainer.rank());
        let ops = [self.dense.op(&keys), self.hashed.op(&keys).padding(7)];
        let batch = self.trainer.prefetch_all(step, &ops).unwrap();
        self.declared[step as usize] = Some(batch);
    }

    fn begin(&mut self, step: u64) {
        if step == 0 {
            (0..LOOKAHEAD).for_each(|first| self.declare(first));
        }
        if step + LOOKAHEAD < STEPS {
            self.declare(step + LOOKAHEAD);
        }
        self.trainer.step_begin(step).unwrap();
    }

    fn work(&mut self, step: u64) {
        let rank = self.trainer.rank();
        let batch = self.declared[step as usize].take().unwrap();
        let offsets = [0, 10, 10, 30, 64];
        let (mut rows, mut sums) = (vec![0.0; 64 * DIM], vec![0.0; 4 * DIM]);
        self.trainer
            .lookup_all(&mut [batch.op(0).rows(&mut rows), batch.op(1).mean(&offsets).rows(&mut sums)])
            .unwrap();
        let noise = (number(step, rank, 1000) % 1000) as f32 / 1000.0;
        let grads: Vec<f32> = rows.iter().map(|x| x * 0.3 + noise).collect();
        let bag_grads: Vec<f32> = sums.iter().map(|x| x * 0.7 - noise).collect();
        self.trainer
            .push_grad_all(&mut [batch.op(0).grads(&grads), batch.op(1).mean(&offsets).grads(&bag_grads)])
            .unwrap();
        self.seen.extend(rows.iter().chain(&sums));
    }

    fn end(&mut self, step: u64) {
        self.trainer.step_end(step).unwrap();
    }
}

fn open(options: EngineOptions) -> (Engine, Vec<Rank>) {
    let engine = options.world_size(RANKS).seed(3).open().unwrap();
    let init = Init::Uniform { low: -1.0, high: 1.0 };
    let dense = TableOptions::new("dense", 200, DIM as u32).init(init).optimizer(Optimizer::adam(0.01));
    let dense = engine.create_table(&dense).unwrap();
    let hashed = TableOptions::new("hashed", 400, DIM as u32).hashed().init(init);
    let hashed = engine.create_table(&hashed.optimizer(Optimizer::adagrad(0.1).mean_ranks(true))).unwrap();
    let ranks = (0..RANKS)
        .map(|rank| Rank {
            trainer: engine.create_trainer(&TrainerOptions::new(rank).cache_ratio(0.1)).unwrap(),
            dense: dense.clone(),
            hashed: hashed.clone(),
            declared: (0..STEPS).map(|_| None).collect(),
            seen: Vec::new(),
        })
        .collect();
    (engine, ranks)
}

/// The bits of all rows that ranks looked up, and of the tables with their state at the end.
fn bits(engine: &Engine, ranks: Vec<Rank>) -> Vec<u32> {
    let mut all: Vec<f32> = Vec::new();
    for rank in &ranks {
        all.extend(&rank.seen);
    }
    drop(ranks);
    for name in ["dense", "hashed"] {
        let table = engine.find_table(name).unwrap();
        let mut keys = table.keys().unwrap();
        keys.sort_unstable();
        let mut rows = vec![0.0; keys.len() * table.dim_with_state()];
        table.get_with_state(&keys, &mut rows, &mut vec![false; keys.len()]).unwrap();
        all.extend(&rows);
        assert!(rows.iter().any(|x| *x != 0.0));
    }
    all.into_iter().map(f32::to_bits).collect()
}

#[test]
fn four_threads_are_bit_equal_to_one() {
    let (engine, mut ranks) = open(EngineOptions::new().flush_threads(0));
    for step in 0..STEPS {
        ranks.iter_mut().for_each(|rank| rank.begin(step));
        ranks.iter_mut().for_each(|rank| rank.work(step));
        ranks.iter_mut().for_each(|rank| rank.end(step));
    }
    let in_turn = bits(&engine, ranks);

    for mode in [FlushMode::Deferred, FlushMode::AtOnce] {
        let (engine, ranks) = open(EngineOptions::new().flush_threads(2).flush_mode(mode));
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|mut rank| {
                thread::spawn(move || {
                    for step in 0..STEPS {
                        rank.begin(step);
                        rank.work(step);
                        rank.end(step);
                    }
                    rank
                })
            })
            .collect();
        let ranks = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(bits(&engine, ranks) == in_turn, "{mode:?}");
    }
}
