//! The cost of the crate over raw calls of the ABI: lookup and push of 65,536 rows and of one row, in steps
//! with declared keys. A random side makes each step, so that other load disturbs both. The program prints
//! medians and lower quartiles; a busy machine changes the quartiles less.

use std::hint::black_box;
use std::ptr;
use std::time::Instant;

use frugal::sys::*;
use frugal::*;

const DIM: usize = 32;

/// Nanoseconds of lookup and of push in each step, by the crate and by raw calls.
#[derive(Default)]
struct Times {
    crate_lookup: Vec<u64>,
    crate_push: Vec<u64>,
    raw_lookup: Vec<u64>,
    raw_push: Vec<u64>,
}

fn main() {
    println!("nanoseconds; dim {DIM}; raw: the same calls of the C ABI\n");
    println!("{:>24}  {:^30}  {:^30}", "", "median", "lower quartile");
    let titles = ["raw", "crate", "ratio"].map(|title| format!("{title:>10}")).concat();
    println!("{:>8}  {:14}  {titles}  {titles}", "rows", "call");
    for (rows, steps) in [(65_536, 1000), (1, 40_000)] {
        let times = measure(rows, steps);
        report(rows, "lookup", &times.raw_lookup, &times.crate_lookup);
        report(rows, "push", &times.raw_push, &times.crate_push);
        let sum = |a: &[u64], b: &[u64]| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<_>>();
        let raw = sum(&times.raw_lookup, &times.raw_push);
        report(rows, "both", &raw, &sum(&times.crate_lookup, &times.crate_push));
    }
}

fn report(rows: usize, call: &str, raw: &[u64], by_crate: &[u64]) {
    print!("{rows:>8}  {call:14}");
    for share in [0.5, 0.25] {
        let (raw, by_crate) = (quantile(raw, share), quantile(by_crate, share));
        print!("  {raw:>10}{by_crate:>10}{:>10.3}", by_crate as f64 / raw as f64);
    }
    println!();
}

fn quantile(times: &[u64], share: f64) -> u64 {
    let mut times = times.to_vec();
    times.sort_unstable();
    times[(times.len() as f64 * share) as usize]
}

/// Measures the nanoseconds of a call.
fn timed(times: &mut Vec<u64>, call: impl FnOnce()) {
    let start = Instant::now();
    call();
    times.push(start.elapsed().as_nanos() as u64);
}

fn measure(rows: usize, steps: u64) -> Times {
    let engine = Engine::open().unwrap();
    let table = engine.create_table(&TableOptions::new("t", 1 << 20, DIM as u32)).unwrap();
    let mut trainer = engine.create_trainer(&TrainerOptions::new(0)).unwrap();
    let keys: Vec<u64> = (0..rows as u64).map(|i| i * 16 % (1 << 20)).collect();
    let grads = vec![1e-3_f32; rows * DIM];
    let mut out = vec![0.0_f32; rows * DIM];
    let mut times = Times::default();
    let mut batch = trainer.prefetch(0, table.op(&keys)).unwrap();
    for step in 0..steps {
        let next = trainer.prefetch(step + 1, table.op(&keys)).unwrap();
        trainer.step_begin(step).unwrap();
        // A bit of a hash, so that no side has all even or all odd steps.
        if (step + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 63 == 0 {
            timed(&mut times.crate_lookup, || trainer.lookup(&batch, black_box(&mut out)).unwrap());
            timed(&mut times.crate_push, || trainer.push_grad(&batch, black_box(&grads)).unwrap());
        } else {
            let op = frugal_op {
                struct_size: size_of::<frugal_op>(),
                table: table.as_raw(),
                batch: batch.as_raw(),
                part: 0,
                pooling: FRUGAL_POOL_NONE as i32,
                keys: ptr::null(),
                count: 0,
                offsets: ptr::null(),
                bags: 0,
                weights: ptr::null(),
                weight_grads_out: ptr::null_mut(),
                rows_out: out.as_mut_ptr(),
                grads: grads.as_ptr(),
                row_stride: 0,
                found_out: ptr::null_mut(),
                padding_key: 0,
                flags: 0,
                reserved: 0,
            };
            // SAFETY: the buffers have a row for each key of the batch.
            timed(&mut times.raw_lookup, || unsafe {
                assert_eq!(frugal_lookup(trainer.as_raw(), black_box(&op), 1), FRUGAL_OK);
            });
            // SAFETY: as above.
            timed(&mut times.raw_push, || unsafe {
                assert_eq!(frugal_push_grad(trainer.as_raw(), black_box(&op), 1), FRUGAL_OK);
            });
        }
        trainer.step_end(step).unwrap();
        batch = next;
    }
    times
}
