//! Trainers and batches, and the calls of a step.

use std::ffi::c_void;
use std::ptr;

use frugal_sys as sys;

use crate::engine::{Engine, read};
use crate::error::{Error, Result, call};
use crate::ops::{LookupOp, Op, Part, PushOp, with_raw_ops};
use crate::options::Timeout;
use crate::rows::{Rows, RowsMut};

/// A rank of synchronous training. Dropping it leaves the rank. A step that it is inside of is then aborted
/// on all ranks.
///
/// ```
/// use std::thread;
///
/// use frugal::{EngineOptions, Init, Optimizer, TableOptions, TrainerOptions};
///
/// # fn main() -> frugal::Result<()> {
/// let engine = EngineOptions::new().world_size(2).open()?;
/// let table = engine.create_table(
///     &TableOptions::new("users", 10, 1).init(Init::Constant(1.0)).optimizer(Optimizer::sgd(0.5)),
/// )?;
/// let ranks: Vec<_> = (0..2)
///     .map(|rank| {
///         let mut trainer = engine.create_trainer(&TrainerOptions::new(rank))?;
///         let table = table.clone();
///         Ok(thread::spawn(move || -> frugal::Result<()> {
///             let keys = [3, 4 + u64::from(rank)];
///             let mut rows = [0.0; 2];
///             for step in 0..10 {
///                 let batch = trainer.prefetch(step, table.op(&keys))?;
///                 trainer.step_begin(step)?;
///                 trainer.lookup(&batch, &mut rows)?;
///                 trainer.push_grad(&batch, &[0.125, 0.25])?;
///                 trainer.step_end(step)?;
///             }
///             Ok(())
///         }))
///     })
///     .collect::<frugal::Result<_>>()?;
/// for rank in ranks {
///     rank.join().unwrap()?;
/// }
/// let mut rows = [0.0; 3];
/// table.get(&[3, 4, 5], &mut rows)?;
/// assert_eq!(rows, [1.0 - 10.0 * 0.5 * (0.125 + 0.125), -0.25, -0.25]);
/// # Ok(()) }
/// ```
///
/// # Threads
///
/// One thread at a time may use a trainer: the methods that call the library take `&mut self`. A trainer can
/// move to another thread between any two calls. Different trainers are independent.
///
/// ```compile_fail
/// # fn both(trainer: &mut frugal::Trainer) {
/// std::thread::scope(|scope| {
///     scope.spawn(|| trainer.step_begin(0));
///     scope.spawn(|| trainer.step_begin(0)); // error: cannot borrow `*trainer` as mutable more than once
/// });
/// # }
/// ```
///
/// # Life
///
/// A trainer does not borrow its engine; [`Engine`] says why. No call keeps a pointer into its slices.
#[derive(Debug)]
pub struct Trainer {
    handle: *mut sys::frugal_trainer,
    engine: *mut sys::frugal_engine,
    rank: u32,
}

// SAFETY: frugal.h: one thread at a time, but any thread, may make a call that takes a trainer as non-const:
// no state of a trainer belongs to a thread. The handles are numbers, never addresses.
unsafe impl Send for Trainer {}
// SAFETY: `&Trainer` gives only numbers: every method that calls the library takes `&mut self`.
unsafe impl Sync for Trainer {}

impl Trainer {
    pub(crate) fn of(handle: *mut sys::frugal_trainer, engine: *mut sys::frugal_engine, rank: u32) -> Self {
        Self { handle, engine, rank }
    }

    /// The rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Declares keys of a step that this trainer has not begun. Several declarations for one step add up. The
    /// call does not wait. It uses keys and padding of the op. The batch names the declaration until its step
    /// ends; it may be dropped earlier. Errors: `KeyOutOfRange`, `StepRange`, `StepAborted`,
    /// `InvalidArgument`; then nothing is declared.
    pub fn prefetch<'a>(&mut self, step: u64, op: impl Into<Op<'a>>) -> Result<Batch> {
        let op = op.into();
        let handle = self.declare(step, &[op.declared()?])?;
        Ok(Batch { handle, parts: Parts::One(op.part()) })
    }

    /// [`prefetch`](Self::prefetch) of many tables: the ops are the batch's parts.
    pub fn prefetch_all(&mut self, step: u64, ops: &[Op<'_>]) -> Result<Batch> {
        let raw = ops.iter().map(Op::declared).collect::<Result<Vec<_>>>()?;
        let handle = self.declare(step, &raw)?;
        Ok(Batch { handle, parts: Parts::Many(ops.iter().map(Op::part).collect()) })
    }

    fn declare(&mut self, step: u64, ops: &[sys::frugal_op]) -> Result<*mut sys::frugal_batch> {
        let mut batch = ptr::null_mut();
        // SAFETY: each op's keys are a slice of its count, which the library copies.
        call(|| unsafe { sys::frugal_prefetch(self.handle, step, ops.as_ptr(), ops.len(), &mut batch) })?;
        Ok(batch)
    }

    /// Takes a declaration back, before its step begins. Errors: `BadHandle`, `StepRange`, `StepAborted`,
    /// `InvalidArgument` (another rank declared it); then the declaration stays.
    pub fn prefetch_cancel(&mut self, batch: &Batch) -> Result<()> {
        // SAFETY: the call accepts any handles.
        call(|| unsafe { sys::frugal_prefetch_cancel(self.handle, batch.handle) })
    }

    /// Begins a step; this is the gate. It waits for each earlier update that a declared row of the step must
    /// see. The first step is any number, the same on all ranks. Each later one is the number after it.
    /// Errors: `StepOrder`, `Timeout` (call again), `StepAborted` (the message names the step to begin),
    /// `Closed`, `Unhealthy`.
    pub fn step_begin(&mut self, step: u64) -> Result<()> {
        self.step_begin_within(step, Timeout::Engine)
    }

    /// [`step_begin`](Self::step_begin) with a time-out.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use frugal::{EngineOptions, ErrorKind, TrainerOptions};
    ///
    /// # fn main() -> frugal::Result<()> {
    /// let engine = EngineOptions::new().world_size(2).open()?;
    /// let mut trainer = engine.create_trainer(&TrainerOptions::new(0))?;
    /// trainer.step_begin(7)?;
    /// trainer.step_end(7)?;
    /// // Rank 1 has not ended step 7.
    /// let error = trainer.step_begin_within(8, Duration::ZERO).unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::Timeout);
    /// # Ok(()) }
    /// ```
    pub fn step_begin_within(&mut self, step: u64, timeout: impl Into<Timeout>) -> Result<()> {
        let timeout = timeout.into().milliseconds();
        // SAFETY: the call accepts any handle.
        call(|| unsafe { sys::frugal_step_begin(self.handle, step, timeout) })
    }

    /// Reads rows in a step, and creates rows of hashed tables. `rows` has a row for each key, or for each
    /// bag. Declared keys are fast; other keys may wait. After an error `rows` has undefined numbers. Errors:
    /// `NotInStep`, `KeyOutOfRange`, `TableFull`, `OutOfMemory`, `Timeout`, `StepAborted`, `InvalidArgument`.
    pub fn lookup<'a>(&mut self, op: impl Into<Op<'a>>, rows: impl Into<RowsMut<'a>>) -> Result<()> {
        self.lookup_all(&mut [op.into().rows(rows)])
    }

    /// [`lookup`](Self::lookup) of many ops in one call, tables in any order. A table may occur more than
    /// once.
    ///
    /// ```
    /// use frugal::{Engine, Init, TableOptions, TrainerOptions};
    ///
    /// # fn main() -> frugal::Result<()> {
    /// let engine = Engine::open()?;
    /// let users = engine.create_table(&TableOptions::new("users", 10, 2).init(Init::Constant(1.0)))?;
    /// let words = engine.create_table(&TableOptions::new("words", 10, 3).init(Init::Constant(2.0)))?;
    /// let mut trainer = engine.create_trainer(&TrainerOptions::new(0))?;
    /// let batch = trainer.prefetch_all(0, &[users.op(&[5, 6]), words.op(&[1, 2, 3])])?;
    /// trainer.step_begin(0)?;
    /// let (mut user_rows, mut word_sums) = ([0.0; 4], [0.0; 3]);
    /// trainer.lookup_all(&mut [
    ///     batch.op(0).rows(&mut user_rows),
    ///     batch.op(1).sum(&[0, 3]).rows(&mut word_sums),
    /// ])?;
    /// assert_eq!((user_rows, word_sums), ([1.0; 4], [6.0; 3]));
    /// trainer.step_end(0)?;
    /// # Ok(()) }
    /// ```
    pub fn lookup_all(&mut self, ops: &mut [LookupOp<'_>]) -> Result<()> {
        with_raw_ops(ops, LookupOp::raw_of_lookup, |raw| {
            // SAFETY: each op's pointers are those of slices whose lengths fit its counts, offsets and
            // stride. The library keeps none of them.
            call(|| unsafe { sys::frugal_lookup(self.handle, raw.as_ptr(), raw.len()) })
        })
    }

    /// Submits gradients of the step: a row for each key, or for each bag. When the call returns, the slices
    /// may be overwritten. A row's gradients are summed over positions, pushes and ranks. The optimizer is
    /// applied once, when the step has ended on all ranks. Errors: `NotInStep`, `KeyOutOfRange`, `TableFull`,
    /// `OutOfMemory`, `Nan`, `StepAborted`, `InvalidArgument`; then nothing is taken.
    pub fn push_grad<'a>(&mut self, op: impl Into<Op<'a>>, grads: impl Into<Rows<'a>>) -> Result<()> {
        self.push_grad_all(&mut [op.into().grads(grads)])
    }

    /// [`push_grad`](Self::push_grad) of many ops in one call, which can also return the gradients of
    /// weights.
    ///
    /// ```
    /// use frugal::{Engine, Init, TableOptions, TrainerOptions};
    ///
    /// # fn main() -> frugal::Result<()> {
    /// let engine = Engine::open()?;
    /// let table = engine.create_table(&TableOptions::new("words", 10, 2).init(Init::Constant(2.0)))?;
    /// let mut trainer = engine.create_trainer(&TrainerOptions::new(0))?;
    /// trainer.step_begin(0)?;
    /// let bags = table.op(&[1, 2]).weighted_sum(&[0, 2], &[0.5, 0.25]);
    /// let mut sums = [0.0; 2];
    /// trainer.lookup(bags, &mut sums)?;
    /// assert_eq!(sums, [1.5, 1.5]);
    /// let mut weight_grads = [0.0; 2];
    /// trainer.push_grad_all(&mut [bags.grads(&[1.0, 3.0]).weight_grads(&mut weight_grads)])?;
    /// assert_eq!(weight_grads, [8.0, 8.0]); // 2 * 1 + 2 * 3
    /// trainer.step_end(0)?;
    /// # Ok(()) }
    /// ```
    pub fn push_grad_all(&mut self, ops: &mut [PushOp<'_>]) -> Result<()> {
        with_raw_ops(ops, PushOp::raw, |raw| {
            // SAFETY: as in lookup_all. These gradients are the caller's memory, so the call itself sums
            // them.
            call(|| unsafe { sys::frugal_push_grad(self.handle, raw.as_ptr(), raw.len()) })
        })
    }

    /// Pushes gradients from memory that the engine lends, which it takes without a copy where that is faster
    /// (`frugal_borrow`). `fill` writes all of them: a row for each key, or for each bag. Before that the
    /// memory has undefined numbers. Errors: those of [`push_grad`](Self::push_grad).
    ///
    /// Closing the engine takes this memory back. So `engine`, which is the trainer's engine, is borrowed
    /// until the gradients are pushed. The slice cannot leave `fill`, and no code can write it after the
    /// push.
    ///
    /// ```
    /// use frugal::{Engine, Optimizer, TableOptions, TrainerOptions};
    ///
    /// # fn main() -> frugal::Result<()> {
    /// let engine = Engine::open()?;
    /// let table = engine.create_table(&TableOptions::new("users", 10, 2).optimizer(Optimizer::sgd(1.0)))?;
    /// let mut trainer = engine.create_trainer(&TrainerOptions::new(0))?;
    /// trainer.step_begin(0)?;
    /// trainer.push_borrowed(&engine, table.op(&[1, 2]), |grads| {
    ///     grads.copy_from_slice(&[1.0, 2.0, 3.0, 4.0]);
    /// })?;
    /// trainer.step_end(0)?;
    /// let mut rows = [0.0; 4];
    /// table.get(&[1, 2], &mut rows)?;
    /// assert_eq!(rows, [-1.0, -2.0, -3.0, -4.0]);
    /// # Ok(()) }
    /// ```
    ///
    /// ```compile_fail
    /// # fn keep(engine: &frugal::Engine, trainer: &mut frugal::Trainer, table: &frugal::Table) {
    /// let mut kept = None;
    /// // error: borrowed data escapes
    /// trainer.push_borrowed(engine, table.op(&[1]), |grads| kept = Some(grads));
    /// # }
    /// ```
    ///
    /// ```compile_fail
    /// # fn close(engine: frugal::Engine, trainer: &mut frugal::Trainer, table: &frugal::Table) {
    /// // error: cannot move out of `engine` because it is borrowed
    /// trainer.push_borrowed(&engine, table.op(&[1]), |grads| engine.close().unwrap());
    /// # }
    /// ```
    pub fn push_borrowed<'a>(
        &mut self,
        engine: &Engine,
        op: impl Into<Op<'a>>,
        fill: impl FnOnce(&mut [f32]),
    ) -> Result<()> {
        if engine.as_raw() != self.engine {
            return Err(Error::invalid("the engine is another than the trainer's".into()));
        }
        let mut checked = op.into().checked()?;
        let floats = checked.rows.checked_mul(checked.dim);
        let bytes = floats.and_then(|n| n.checked_mul(size_of::<f32>()));
        let (Some(floats), Some(bytes)) = (floats, bytes) else {
            return Err(Error::invalid(format!("{} rows exceed the address space", checked.rows)));
        };
        let mut memory = ptr::null_mut();
        // SAFETY: the call writes the address.
        call(|| unsafe { sys::frugal_borrow(self.handle, bytes, &mut memory) })?;
        // SAFETY: the memory has `bytes` bytes, aligned to 64, and no other code uses it until the push. Only
        // these take it back: closing the engine (`engine` is borrowed), closing the trainer or its other
        // calls (`self` is borrowed). After another rank's abort it stays until a call of this rank reports
        // the abort. Its bytes come from another program's allocator; any bytes are floats.
        fill(unsafe { std::slice::from_raw_parts_mut(memory.cast(), floats) });
        checked.raw.grads = memory.cast();
        // SAFETY: the op's pointers are those of checked slices; its gradients are the memory that was just
        // filled.
        call(|| unsafe { sys::frugal_push_grad(self.handle, &checked.raw, 1) })
    }

    /// Ends the step on this rank. The step commits when the last rank has ended it. The call never waits for
    /// another rank. Errors: `NotInStep`, `StepOrder`, `StepAborted`, `OutOfMemory` (the rank is still inside
    /// the step: call again), and on a GPU `Nan`, `Device`, `Timeout`.
    pub fn step_end(&mut self, step: u64) -> Result<()> {
        self.end(step, 0)
    }

    /// [`step_end`](Self::step_end) of a step that commits without any update, for example after an overflow.
    /// It is enough that one rank calls it.
    pub fn step_end_skip(&mut self, step: u64) -> Result<()> {
        self.end(step, sys::FRUGAL_STEP_SKIP)
    }

    fn end(&mut self, step: u64, flags: u32) -> Result<()> {
        // SAFETY: the call accepts any handle.
        call(|| unsafe { sys::frugal_step_end(self.handle, step, flags) })
    }

    /// Undoes every uncommitted step on all ranks. The tables are then as of the last committed step;
    /// declarations stay. The next call of each other rank returns `StepAborted`, once. Then all ranks begin
    /// the step after the last committed one again. Errors: `NotInStep`, `StepAborted` (another rank aborted
    /// first).
    pub fn step_abort(&mut self) -> Result<()> {
        // SAFETY: the call accepts any handle.
        call(|| unsafe { sys::frugal_step_abort(self.handle) })
    }

    /// Reads rows like [`Engine::read`], but as this rank. Inside a step it sees what a lookup sees. Between
    /// steps it waits like the next step's gate. Errors: `KeyOutOfRange`, `Timeout`, `StepAborted`,
    /// `InvalidArgument`.
    pub fn read<'a>(&mut self, op: impl Into<Op<'a>>, rows: impl Into<RowsMut<'a>>) -> Result<()> {
        self.read_all(&mut [op.into().rows(rows)], Timeout::Engine)
    }

    /// [`read`](Self::read) of many ops in one call, with a time-out.
    pub fn read_all(&mut self, ops: &mut [LookupOp<'_>], timeout: impl Into<Timeout>) -> Result<()> {
        read(self.engine, self.handle, ops, timeout.into())
    }

    /// Names the CUDA stream (a `cudaStream_t`) in which this trainer's calls do their GPU work from now on.
    /// NULL is the device's default stream. Errors: `Unsupported` (the CPU has no streams), `Device`.
    ///
    /// # Safety
    ///
    /// `stream` is NULL or a stream of the trainer's device. It lives until the last step that used it is
    /// committed, and until another stream has been named.
    pub unsafe fn set_stream(&mut self, stream: *mut c_void) -> Result<()> {
        // SAFETY: the caller promises it.
        call(|| unsafe { sys::frugal_set_stream(self.handle, stream) })
    }

    /// Leaves the rank: from now on no rank waits for it. Its declarations are cancelled. A step that it is
    /// inside of is aborted on all ranks. Dropping does the same and reports no error; while the thread
    /// panics, dropping is [`Trainer::abandon`]. Errors: `BadHandle`, `Forked`.
    pub fn close(mut self) -> Result<()> {
        self.leave()
    }

    /// Gives the rank up, for a program that fails: as if its process had ended. With a service every
    /// uncommitted step is undone, and the other ranks' calls return `PeerLost`. Their next step waits until
    /// a trainer joins as this rank. Without a service it is [`Trainer::close`]. Dropping does this while the
    /// thread panics. Errors: `BadHandle`, `Forked`.
    pub fn abandon(mut self) -> Result<()> {
        self.give_up()
    }

    fn give_up(&mut self) -> Result<()> {
        let handle = std::mem::replace(&mut self.handle, ptr::null_mut());
        // SAFETY: the call accepts any value, also NULL.
        call(|| unsafe { sys::frugal_trainer_abandon(handle) })
    }

    fn leave(&mut self) -> Result<()> {
        let handle = std::mem::replace(&mut self.handle, ptr::null_mut());
        // SAFETY: the call accepts any value, also NULL.
        call(|| unsafe { sys::frugal_trainer_close(handle) })
    }

    /// The handle, for calls of [`crate::sys`], for example with memory of a GPU. This object still owns it.
    pub fn as_raw(&self) -> *mut sys::frugal_trainer {
        self.handle
    }
}

impl Drop for Trainer {
    fn drop(&mut self) {
        let _ = if std::thread::panicking() { self.give_up() } else { self.leave() };
    }
}

/// Keys that were declared for one step. A batch only names them: the library releases them when the step
/// ends. Dropping a batch does not take its declaration back; [`Trainer::prefetch_cancel`] does.
#[derive(Clone, Debug)]
pub struct Batch {
    handle: *mut sys::frugal_batch,
    parts: Parts,
}

#[derive(Clone, Debug)]
enum Parts {
    One(Part),
    Many(Box<[Part]>),
}

// SAFETY: frugal.h: all calls but prefetch_cancel take a batch as const. prefetch_cancel is limited to one
// thread by its `&mut Trainer`, not by the batch. The handles are numbers, never addresses.
unsafe impl Send for Batch {}
// SAFETY: as above.
unsafe impl Sync for Batch {}

impl Batch {
    /// An op of exactly the declared keys of a part. `part` is the index of an op in the call that declared
    /// the batch. If the batch has no such part, the call that gets the op refuses it.
    pub fn op(&self, part: usize) -> Op<'_> {
        Op::of_part(self, Some(part))
    }

    /// Number of parts.
    pub fn parts(&self) -> usize {
        self.all().len()
    }

    /// Number of keys, over all parts.
    pub fn key_count(&self) -> usize {
        self.all().iter().map(|part| part.keys).sum()
    }

    fn all(&self) -> &[Part] {
        match &self.parts {
            Parts::One(part) => std::slice::from_ref(part),
            Parts::Many(parts) => parts,
        }
    }

    /// A part and its index; None is the only part.
    pub(crate) fn part(&self, part: Option<usize>) -> Result<(u32, Part)> {
        let parts = self.all();
        let Some(number) = part.or((parts.len() == 1).then_some(0)) else {
            return Err(Error::invalid(format!(
                "the batch has {} parts: name one by Batch::op",
                parts.len()
            )));
        };
        match (parts.get(number), u32::try_from(number)) {
            (Some(part), Ok(number)) => Ok((number, *part)),
            _ => Err(Error::invalid(format!("part {number}: the batch has {}", parts.len()))),
        }
    }

    /// The handle, for calls of [`crate::sys`].
    pub fn as_raw(&self) -> *mut sys::frugal_batch {
        self.handle
    }
}
