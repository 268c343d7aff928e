//! Ops: the keys of one table in a call, and the call's slices.

use std::ptr;

use frugal_sys as sys;

use crate::error::{Error, Result};
use crate::rows::{Rows, RowsMut, check_count};
use crate::table::{Table, clear};
use crate::trainer::Batch;

/// The keys of one table in a call, and how their rows are pooled. [`Table::op`] and [`Batch::op`] make one;
/// so does a `&Batch` that declares one table. It is plain data that borrows slices. One op serves
/// declaration, lookup and push.
///
/// ```
/// use frugal::{Engine, Init, TableOptions, TrainerOptions};
///
/// # fn main() -> frugal::Result<()> {
/// let engine = Engine::open()?;
/// let table = engine.create_table(&TableOptions::new("words", 100, 1).init(Init::Constant(1.0)))?;
/// let mut trainer = engine.create_trainer(&TrainerOptions::new(0))?;
/// trainer.step_begin(0)?;
///
/// let keys = [3, 4, 0, 5];
/// let bags = table.op(&keys).mean(&[0, 2, 4]).padding(0); // two bags; key 0 is padding
/// let mut means = [0.0; 2];
/// trainer.lookup(bags, &mut means)?;
/// assert_eq!(means, [1.0, 1.0]);
/// trainer.push_grad(bags, &[0.5, 0.25])?; // a gradient for each bag
/// trainer.step_end(0)?;
/// # Ok(()) }
/// ```
///
/// An op cannot outlive the slices that it borrows:
///
/// ```compile_fail
/// # use frugal::{Engine, Init, TableOptions, TrainerOptions};
/// # fn main() -> frugal::Result<()> {
/// # let engine = Engine::open()?;
/// # let table = engine.create_table(&TableOptions::new("words", 100, 1))?;
/// # let mut trainer = engine.create_trainer(&TrainerOptions::new(0))?;
/// let op = {
///     let keys = vec![1, 2, 3];
///     table.op(&keys) // error: `keys` does not live long enough
/// };
/// trainer.prefetch(0, op)?;
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Op<'a> {
    selection: Selection<'a>,
    pooling: Pooling<'a>,
    padding: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
enum Selection<'a> {
    Keys {
        table: &'a Table,
        keys: &'a [u64],
    },
    /// `part` None is the batch's only part. `keys` None is exactly the declared keys.
    Part {
        batch: &'a Batch,
        part: Option<usize>,
        keys: Option<&'a [u64]>,
    },
}

#[derive(Clone, Copy, Debug)]
enum Pooling<'a> {
    None,
    Sum { offsets: &'a [u64], weights: Option<&'a [f32]> },
    Mean { offsets: &'a [u64] },
}

/// An op whose pointers are those of checked slices, and the counts that further slices must have.
pub(crate) struct Checked {
    pub(crate) raw: sys::frugal_op,
    keys: usize,
    pub(crate) rows: usize,
    pub(crate) dim: usize,
}

impl<'a> Op<'a> {
    pub(crate) fn of_keys(table: &'a Table, keys: &'a [u64]) -> Self {
        Self { selection: Selection::Keys { table, keys }, pooling: Pooling::None, padding: None }
    }

    pub(crate) fn of_part(batch: &'a Batch, part: Option<usize>) -> Self {
        Self { selection: Selection::Part { batch, part, keys: None }, pooling: Pooling::None, padding: None }
    }

    /// For an op of a batch: any keys instead of exactly the declared ones, for example a subset in any
    /// order. Keys that the batch declared are resolved already.
    pub fn keys(mut self, keys: &'a [u64]) -> Self {
        match &mut self.selection {
            Selection::Keys { keys: mine, .. } => *mine = keys,
            Selection::Part { keys: mine, .. } => *mine = Some(keys),
        }
        self
    }

    /// A row for each bag: the sum of its rows. Bag b has the keys `offsets[b]..offsets[b + 1]`. There is one
    /// more offset than bags; the first is 0, the last is the number of keys. An empty bag's row is zeros.
    pub fn sum(mut self, offsets: &'a [u64]) -> Self {
        self.pooling = Pooling::Sum { offsets, weights: None };
        self
    }

    /// [`sum`](Self::sum) with a factor for each key.
    pub fn weighted_sum(mut self, offsets: &'a [u64], weights: &'a [f32]) -> Self {
        self.pooling = Pooling::Sum { offsets, weights: Some(weights) };
        self
    }

    /// [`sum`](Self::sum), divided by the bag's number of keys. Padding is not counted.
    pub fn mean(mut self, offsets: &'a [u64]) -> Self {
        self.pooling = Pooling::Mean { offsets };
        self
    }

    /// Rows of this key read as zeros, take no gradient and are never created.
    pub fn padding(mut self, key: u64) -> Self {
        self.padding = Some(key);
        self
    }

    /// Adds the rows that a lookup or a read writes: one for each key, or for each bag.
    pub fn rows(self, rows: impl Into<RowsMut<'a>>) -> LookupOp<'a> {
        LookupOp { op: self, rows: rows.into(), found: None }
    }

    /// Adds the gradients of a push: one row for each key, or for each bag.
    pub fn grads(self, grads: impl Into<Rows<'a>>) -> PushOp<'a> {
        PushOp { op: self, grads: grads.into(), weight_grads: None }
    }

    /// The op for a declaration, which uses only keys and padding.
    pub(crate) fn declared(&self) -> Result<sys::frugal_op> {
        match self.selection {
            Selection::Keys { table, keys } => Ok(self.start(table.as_raw(), keys)),
            Selection::Part { .. } => Err(Error::invalid("a declaration takes keys, not a batch".into())),
        }
    }

    /// Table, number of keys and dimension of a declared op.
    pub(crate) fn part(&self) -> Part {
        match self.selection {
            Selection::Keys { table, keys } => {
                Part { table: table.as_raw(), keys: keys.len(), dim: table.dim() }
            }
            Selection::Part { .. } => unreachable!("declared() refuses it"),
        }
    }

    fn start(&self, table: *mut sys::frugal_table, keys: &[u64]) -> sys::frugal_op {
        sys::frugal_op {
            struct_size: size_of::<sys::frugal_op>(),
            table,
            batch: ptr::null(),
            part: 0,
            pooling: sys::FRUGAL_POOL_NONE as i32,
            keys: keys.as_ptr(),
            count: keys.len(),
            offsets: ptr::null(),
            bags: 0,
            weights: ptr::null(),
            weight_grads_out: ptr::null_mut(),
            rows_out: ptr::null_mut(),
            grads: ptr::null(),
            row_stride: 0,
            found_out: ptr::null_mut(),
            padding_key: self.padding.unwrap_or(0),
            flags: if self.padding.is_some() { sys::FRUGAL_OP_PADDING } else { 0 },
            reserved: 0,
        }
    }

    pub(crate) fn checked(&self) -> Result<Checked> {
        let (mut raw, count, dim) = match self.selection {
            Selection::Keys { table, keys } => (self.start(table.as_raw(), keys), keys.len(), table.dim()),
            Selection::Part { batch, part, keys } => {
                let (number, part) = batch.part(part)?;
                let mut raw = self.start(part.table, keys.unwrap_or(&[]));
                raw.batch = batch.as_raw();
                raw.part = number;
                if keys.is_none() {
                    raw.keys = ptr::null();
                }
                (raw, keys.map_or(part.keys, <[u64]>::len), part.dim)
            }
        };
        let offsets = match self.pooling {
            Pooling::None => return Ok(Checked { raw, keys: count, rows: count, dim }),
            Pooling::Sum { offsets, weights } => {
                raw.pooling = sys::FRUGAL_POOL_SUM as i32;
                if let Some(weights) = weights {
                    check_count("weights", weights.len(), count, "keys")?;
                    raw.weights = weights.as_ptr();
                }
                offsets
            }
            Pooling::Mean { offsets } => {
                raw.pooling = sys::FRUGAL_POOL_MEAN as i32;
                offsets
            }
        };
        if offsets.is_empty() {
            return Err(Error::invalid(
                "offsets is empty: it has one element more than there are bags".into(),
            ));
        }
        raw.offsets = offsets.as_ptr();
        raw.bags = offsets.len() - 1;
        Ok(Checked { rows: raw.bags, raw, keys: count, dim })
    }
}

/// The op of a batch that declares one table: exactly its keys.
impl<'a> From<&'a Batch> for Op<'a> {
    fn from(batch: &'a Batch) -> Self {
        Op::of_part(batch, None)
    }
}

/// An op of a lookup or a read; [`Op::rows`] makes it.
///
/// No two ops of a call can write the same rows:
///
/// ```compile_fail
/// # fn both(trainer: &mut frugal::Trainer, table: &frugal::Table) -> frugal::Result<()> {
/// let mut rows = [0.0; 8];
/// let first = table.op(&[1]).rows(&mut rows);
/// let second = table.op(&[2]).rows(&mut rows); // error: cannot borrow `rows` as mutable more than once
/// trainer.lookup_all(&mut [first, second])
/// # }
/// ```
#[derive(Debug)]
pub struct LookupOp<'a> {
    op: Op<'a>,
    rows: RowsMut<'a>,
    found: Option<&'a mut [bool]>,
}

impl<'a> LookupOp<'a> {
    /// For a read: writes for each key whether it has a row. After an error all are `false`. (A lookup
    /// creates missing rows, so it refuses this.)
    pub fn found(mut self, found: &'a mut [bool]) -> Self {
        self.found = Some(found);
        self
    }

    pub(crate) fn raw(&mut self) -> Result<sys::frugal_op> {
        let Checked { mut raw, keys, rows, dim } = self.op.checked()?;
        (raw.rows_out, raw.row_stride) = self.rows.raw("rows", rows, dim)?;
        if let Some(found) = &mut self.found {
            check_count("found", found.len(), keys, "keys")?;
            raw.found_out = found.as_mut_ptr().cast();
        }
        Ok(raw)
    }

    pub(crate) fn raw_of_lookup(&mut self) -> Result<sys::frugal_op> {
        if self.found.is_some() {
            return Err(Error::invalid("found: a lookup creates missing rows; a read reports them".into()));
        }
        self.raw()
    }

    pub(crate) fn clear_found(&mut self) {
        if let Some(found) = &mut self.found {
            clear(found);
        }
    }
}

/// An op of a push; [`Op::grads`] makes it.
#[derive(Debug)]
pub struct PushOp<'a> {
    op: Op<'a>,
    grads: Rows<'a>,
    weight_grads: Option<&'a mut [f32]>,
}

impl<'a> PushOp<'a> {
    /// Adds an output: the gradient of each factor of a [`weighted_sum`](Op::weighted_sum).
    pub fn weight_grads(mut self, weight_grads: &'a mut [f32]) -> Self {
        self.weight_grads = Some(weight_grads);
        self
    }

    pub(crate) fn raw(&mut self) -> Result<sys::frugal_op> {
        let Checked { mut raw, keys, rows, dim } = self.op.checked()?;
        (raw.grads, raw.row_stride) = self.grads.raw("grads", rows, dim)?;
        if let Some(weight_grads) = &mut self.weight_grads {
            check_count("weight_grads", weight_grads.len(), keys, "keys")?;
            raw.weight_grads_out = weight_grads.as_mut_ptr();
        }
        Ok(raw)
    }
}

/// A part of a batch: the facts of its op.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) table: *mut sys::frugal_table,
    pub(crate) keys: usize,
    pub(crate) dim: usize,
}

/// Converts ops to raw ones and passes them to a call. One op, the most frequent case, needs no allocation.
pub(crate) fn with_raw_ops<T, R>(
    ops: &mut [T],
    mut raw: impl FnMut(&mut T) -> Result<sys::frugal_op>,
    function: impl FnOnce(&[sys::frugal_op]) -> Result<R>,
) -> Result<R> {
    if let [op] = ops {
        return function(&[raw(op)?]);
    }
    let raw: Result<Vec<_>> = ops.iter_mut().map(raw).collect();
    function(&raw?)
}
