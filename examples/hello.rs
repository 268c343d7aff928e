//! Frugal in one page of Rust: open an engine, train two rows for ten steps, read them.
//!     cargo run --manifest-path bindings/rust/Cargo.toml --example hello
//! The same program in other languages: hello.c, hello.cpp, hello.py, hello.jl.

use frugal::{Engine, Optimizer, TableOptions, TrainerOptions};

const DIM: usize = 4;

fn main() -> frugal::Result<()> {
    // An engine with all defaults: one rank, keys declared up to ten steps ahead.
    let engine = Engine::open()?;

    // A table of 1000 rows of 4 floats, all zeros, trained by SGD.
    let table = engine.create_table(
        &TableOptions::new("items", 1000, DIM as u32).optimizer(Optimizer::sgd(0.1)),
    )?;
    let mut trainer = engine.create_trainer(&TrainerOptions::new(0))?;

    // Rows 7 and 42 learn to be ones. Key 7 comes twice: its gradients are summed.
    let keys = [7, 42, 7];
    let mut rows = [0.0; 3 * DIM];
    let mut grads = [0.0; 3 * DIM];
    let mut batch = trainer.prefetch(0, table.op(&keys))?;

    for step in 0..10 {
        // What the next step needs is brought up to date while this one computes.
        let next = trainer.prefetch(step + 1, table.op(&keys))?;
        trainer.step_begin(step)?;
        trainer.lookup(&batch, &mut rows)?; // exactly the declared keys

        let mut loss = 0.0; // half the squared distance from one, whose gradient is row - 1
        for (grad, row) in grads.iter_mut().zip(&rows) {
            *grad = row - 1.0;
            loss += 0.5 * f64::from(*grad) * f64::from(*grad);
        }
        trainer.push_grad(&batch, &grads)?;
        trainer.step_end(step)?;
        println!("step {step}: loss {loss:.6}");
        batch = next;
    }

    // Outside steps rows are read by their keys.
    table.get(&keys[..2], &mut rows[..2 * DIM])?;
    for (key, row) in keys.iter().zip(rows[..2 * DIM].chunks(DIM)) {
        println!(
            "row {key}: {:.6} {:.6} {:.6} {:.6}",
            row[0], row[1], row[2], row[3]
        );
    }
    engine.close() // its tables and trainers with it; dropping it does the same
}
