//! What the crate costs over raw calls of the ABI: lookup and push of 65,536 rows and of one row, in steps whose keys
//! were declared. Both sides take turns, step by step, so that what disturbs the machine disturbs both.

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
    println!("nanoseconds, medians; dim {DIM}; raw: the same calls of the C ABI\n");
    println!("{:>8}  {:6}  {:>12}  {:>12}  {:>7}", "rows", "call", "raw", "crate", "ratio");
    for (rows, steps) in [(65_536, 300), (1, 40_000)] {
        let times = measure(rows, steps);
        report(rows, "lookup", &times.raw_lookup, &times.crate_lookup);
        report(rows, "push", &times.raw_push, &times.crate_push);
        let sum = |a: &[u64], b: &[u64]| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<_>>();
        let raw = sum(&times.raw_lookup, &times.raw_push);
        report(rows, "both", &raw, &sum(&times.crate_lookup, &times.crate_push));
    }
}

fn report(rows: usize, call: &str, raw: &[u64], by_crate: &[u64]) {
    let (raw, by_crate) = (median(raw), median(by_crate));
    let ratio = by_crate as f64 / raw as f64;
    println!("{rows:>8}  {call:6}  {raw:>12}  {by_crate:>12}  {ratio:>7.3}");
}

fn median(times: &[u64]) -> u64 {
    let mut times = times.to_vec();
    times.sort_unstable();
    times[times.len() / 2]
}

/// Nanoseconds that a call takes.
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
        if step % 2 == 0 {
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
