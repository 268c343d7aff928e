//! Trains embedding tables that are larger than a GPU's memory, with the exact result of
//! synchronous training.
//!
//! An [`Engine`] owns [`Table`]s; each rank of training is a [`Trainer`], which declares the keys of later steps, and
//! looks up rows and pushes gradients inside a step:
//!
//! ```
//! use frugal::{Engine, Init, Optimizer, TableOptions, TrainerOptions};
//!
//! fn main() -> frugal::Result<()> {
//!     let engine = Engine::open()?;
//!     let table = engine.create_table(
//!         &TableOptions::new("users", 1000, 16)
//!             .init(Init::Uniform { low: -0.1, high: 0.1 })
//!             .optimizer(Optimizer::adagrad(0.05)),
//!     )?;
//!     let mut trainer = engine.create_trainer(&TrainerOptions::new(0))?;
//!     let mut rows = vec![0.0; 3 * table.dim()];
//!     for step in 0..10 {
//!         let keys = [step, step + 1, 7];
//!         let batch = trainer.prefetch(step, table.op(&keys))?; // may come many steps before
//!         trainer.step_begin(step)?; // waits until the rows are up to date
//!         trainer.lookup(&batch, &mut rows)?;
//!         let grads: Vec<f32> = rows.iter().map(|x| 2.0 * x).collect();
//!         trainer.push_grad(&batch, &grads)?;
//!         trainer.step_end(step)?;
//!     }
//!     assert_eq!(engine.committed_step()?, Some(9));
//!     Ok(())
//! }
//! ```
//!
//! # Slices in, slices out
//!
//! Keys are `&[u64]` ([`as_keys`] for `i64`), rows and gradients `f32` slices, packed or with a stride ([`Rows`],
//! [`RowsMut`]). Their addresses go to the library as they are, one call of the library for each call; it copies
//! what it needs and keeps no pointer. So no borrow outlives a call, and forgetting any object
//! ([`std::mem::forget`]) leaks it and does no other harm. A slice of the wrong length is
//! [`ErrorKind::InvalidArgument`].
//!
//! # Errors, threads, waits
//!
//! A failed call is an [`Error`]: kind, message, and codes of the system or the GPU. `frugal.h` says what each call
//! means; documentation here names the kinds that are a call's own. Beside them each may answer `BadHandle`, `Forked`,
//! `InvalidArgument`, `OutOfMemory`, `Internal`, `Closed`, `Unhealthy`, and those of a trainer on a GPU `Device` and
//! `Unsupported`. Everything here is there since version 0.1.
//!
//! A [`Trainer`] is used by one thread at a time, everything else by any number. Waits end by a [`Timeout`].
//!
//! # CUDA
//!
//! The methods take host memory. For memory of a GPU call [`sys`] with the handles that `as_raw` gives, in `unsafe`.
#![deny(missing_docs)]
#![warn(missing_debug_implementations)]

mod engine;
mod error;
mod log;
mod ops;
mod options;
mod rows;
mod table;
mod trainer;

pub use frugal_sys as sys;

pub use engine::{Engine, Stats, version};
pub use error::{Error, ErrorKind, Result, check};
pub use log::LogLevel;
pub use ops::{LookupOp, Op, PushOp};
pub use options::{
    Backing, EngineOptions, FlushMode, Init, KeySpace, Memory, NanPolicy, Optimizer, OptimizerKind,
    TableOptions, Timeout, TrainerOptions, memory_needed,
};
pub use rows::{Rows, RowsMut, as_keys};
pub use table::{Table, TableInfo};
pub use trainer::{Batch, Trainer};

/// Its examples run, too.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
