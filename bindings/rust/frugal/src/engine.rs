//! The engine, which owns tables and threads.

use std::path::Path;
use std::ptr;

use frugal_sys as sys;

use crate::error::{ErrorKind, Result, call, check_version};
use crate::log;
use crate::ops::{LookupOp, Op, with_raw_ops};
use crate::options::{EngineOptions, TableOptions, Timeout, TrainerOptions, c_path, c_string};
use crate::rows::RowsMut;
use crate::table::Table;
use crate::trainer::Trainer;

/// An opened engine. It owns tables, rows and background threads. Dropping it closes it.
///
/// # Life
///
/// Closing an engine writes the pending updates and frees all memory. [`Table`], [`Trainer`] and
/// [`Batch`](crate::Batch) do not borrow the engine and do not keep it open: they are handles with a
/// generation. After the engine is closed, their calls return
/// [`ErrorKind::BadHandle`](crate::ErrorKind::BadHandle). Objects may be dropped in any order.
///
/// So a trainer can move into a detached thread, and the program shows where the engine is closed. If the
/// engine is closed while a thread waits in a step (its owner may be unwinding from a panic), the wait
/// returns [`ErrorKind::Closed`](crate::ErrorKind::Closed). The wait does not keep the engine or the thread
/// alive. Threads that share the engine itself take `&Engine` in a scope, or an `Arc<Engine>`.
///
/// An engine that is forgotten ([`std::mem::forget`]) stays open until the process ends; it has no pointer
/// into the caller's memory. In a child of `fork` calls return
/// [`ErrorKind::Forked`](crate::ErrorKind::Forked) and drops do nothing.
///
/// # Threads
///
/// Any number of threads may use an engine at once.
#[derive(Debug)]
pub struct Engine {
    handle: *mut sys::frugal_engine,
    hook: Option<usize>,
}

// SAFETY: frugal.h: any number of threads may use a const handle at once. Any thread may make the calls
// that take an engine as non-const (table_create, trainer_create, close). The handle is a number, never an
// address.
unsafe impl Send for Engine {}
// SAFETY: as above.
unsafe impl Sync for Engine {}

impl Engine {
    /// Opens an engine with all defaults: one rank, synchronous. Errors: `OutOfMemory`, `StructSize` (see
    /// [`EngineOptions::open`]).
    pub fn open() -> Result<Self> {
        EngineOptions::new().open()
    }

    pub(crate) fn with_options(options: &EngineOptions) -> Result<Self> {
        check_version()?;
        let service = options.service.as_deref().map(|s| c_path("the service's address", s)).transpose()?;
        let hook = options.hook.clone().map(log::add);
        let mut config = options.with_hook(hook);
        config.service = service.as_ref().map_or(ptr::null(), |s| s.as_ptr());
        let mut handle = ptr::null_mut();
        // SAFETY: the config is complete; its hook may be called by any thread and does not unwind. The
        // address of the service lives during the call.
        let opened = call(|| unsafe { sys::frugal_open(&config, &mut handle) });
        if let (Err(_), Some(number)) = (&opened, hook) {
            log::remove(number);
        }
        opened.map(|()| Self { handle, hook })
    }

    /// Closes the engine: writes the pending updates and frees all memory, also the tables. A step that a
    /// rank is inside of is lost. Waiting calls of other threads return `Closed`. Dropping does the same and
    /// reports no error. Errors: `Forked` (the engine is not closed).
    pub fn close(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let handle = std::mem::replace(&mut self.handle, ptr::null_mut());
        if handle.is_null() {
            return Ok(());
        }
        // SAFETY: any value may be closed.
        call(|| unsafe { sys::frugal_close(handle) })?;
        // After an error (in a forked child or inside a hook) the engine may still use the closure, which
        // stays.
        if let Some(number) = self.hook.take() {
            log::remove(number);
        }
        Ok(())
    }

    /// Returns the first failure of a background thread. Every call after one returns `Unhealthy`.
    pub fn health(&self) -> Result<()> {
        // SAFETY: the call accepts any handle.
        call(|| unsafe { sys::frugal_health(self.handle) })
    }

    /// Waits until every update of every committed step is in the host rows. The calling thread helps.
    /// Errors: `Timeout`, `Unhealthy`.
    pub fn flush(&self) -> Result<()> {
        self.flush_within(Timeout::Engine)
    }

    /// [`flush`](Self::flush) with a time-out.
    pub fn flush_within(&self, timeout: impl Into<Timeout>) -> Result<()> {
        let timeout = timeout.into().milliseconds();
        // SAFETY: any handle may be flushed.
        call(|| unsafe { sys::frugal_flush(self.handle, timeout) })
    }

    /// The last step that all ranks have ended, if any.
    pub fn committed_step(&self) -> Result<Option<u64>> {
        let mut step = sys::FRUGAL_NO_STEP;
        // SAFETY: the call writes the number.
        call(|| unsafe { sys::frugal_committed_step(self.handle, &mut step) })?;
        Ok((step != sys::FRUGAL_NO_STEP).then_some(step))
    }

    /// Creates a table and the initial values of its rows. The engine owns it; [`Table`] is a handle. Errors:
    /// `InvalidArgument`, `Exists`, `OutOfMemory`, `Busy` (a rank is inside a step).
    pub fn create_table(&self, options: &TableOptions) -> Result<Table> {
        let mut table = ptr::null_mut();
        // SAFETY: the raw struct is complete, and its name lives during the call.
        options.with_raw(|raw| unsafe { sys::frugal_table_create(self.handle, raw, &mut table) })?;
        Table::of(table)
    }

    /// Finds a table by its name. Errors: `NotFound`.
    pub fn find_table(&self, name: &str) -> Result<Table> {
        let name = c_string("the table's name", name)?;
        let mut table = ptr::null_mut();
        // SAFETY: the name is a C string that lives during the call.
        call(|| unsafe { sys::frugal_table_find(self.handle, name.as_ptr(), &mut table) })?;
        Table::of(table)
    }

    /// The names of all tables in the order of their creation, including those of other processes and
    /// languages.
    ///
    /// ```
    /// use frugal::{Engine, TableOptions};
    ///
    /// # fn main() -> frugal::Result<()> {
    /// let engine = Engine::open()?;
    /// engine.create_table(&TableOptions::new("users", 10, 2))?;
    /// engine.create_table(&TableOptions::new("items", 10, 2))?;
    /// assert_eq!(engine.table_names()?, ["users", "items"]);
    /// # Ok(()) }
    /// ```
    pub fn table_names(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        let (mut cursor, mut name) = (0, [0u8; 256]);
        loop {
            let (mut size, at) = (0, name.as_mut_ptr().cast());
            // SAFETY: the memory has that many bytes.
            call(|| unsafe { sys::frugal_table_next(self.handle, &mut cursor, at, name.len(), &mut size) })?;
            if size == 0 {
                return Ok(names);
            }
            names.push(String::from_utf8_lossy(&name[..size - 1]).into_owned());
        }
    }

    /// Joins as a rank. The trainer leaves the rank when it is dropped. Errors: `InvalidArgument`, `Exists`
    /// (the rank has a trainer), `Busy`, `Device`, `OutOfMemory`, `Timeout`.
    pub fn create_trainer(&self, options: &TrainerOptions) -> Result<Trainer> {
        let mut trainer = ptr::null_mut();
        // SAFETY: the raw struct is complete, and its device lives during the call.
        options.with_raw(|raw| unsafe { sys::frugal_trainer_create(self.handle, raw, &mut trainer) })?;
        Ok(Trainer::of(trainer, self.handle, options.rank()))
    }

    /// Reads rows for evaluation or serving, between steps. It creates no row and declares nothing. Missing
    /// keys read as zeros. [`Trainer::read`] reads inside a step. Errors: `KeyOutOfRange`, `Busy` (a rank is
    /// inside a step), `Timeout`, `InvalidArgument`.
    ///
    /// ```
    /// use frugal::{Engine, Init, TableOptions};
    ///
    /// # fn main() -> frugal::Result<()> {
    /// let engine = Engine::open()?;
    /// let table = engine.create_table(&TableOptions::new("users", 10, 2).init(Init::Constant(0.5)))?;
    /// let mut sums = [0.0; 4];
    /// engine.read(table.op(&[1, 2, 3]).sum(&[0, 1, 3]), &mut sums)?; // two bags
    /// assert_eq!(sums, [0.5, 0.5, 1.0, 1.0]);
    /// # Ok(()) }
    /// ```
    pub fn read<'a>(&self, op: impl Into<Op<'a>>, rows: impl Into<RowsMut<'a>>) -> Result<()> {
        self.read_all(&mut [op.into().rows(rows)], Timeout::Engine)
    }

    /// [`read`](Self::read) of many ops in one call, with a time-out.
    pub fn read_all(&self, ops: &mut [LookupOp<'_>], timeout: impl Into<Timeout>) -> Result<()> {
        read(self.handle, ptr::null_mut(), ops, timeout.into())
    }

    /// Counters since the engine was opened.
    ///
    /// ```
    /// # fn main() -> frugal::Result<()> {
    /// let engine = frugal::Engine::open()?;
    /// assert_eq!(engine.stats()?.steps_committed, 0);
    /// # Ok(()) }
    /// ```
    pub fn stats(&self) -> Result<Stats> {
        // SAFETY: a struct of integers may be zeros.
        let mut raw: sys::frugal_stats = unsafe { std::mem::zeroed() };
        raw.struct_size = size_of_val(&raw);
        // SAFETY: the call fills the struct, whose size is set.
        call(|| unsafe { sys::frugal_get_stats(self.handle, &mut raw) })?;
        Ok(Stats::of(&raw))
    }

    /// The text of a Prometheus scrape (text exposition format 0.0.4): all of [`stats`](Self::stats), the
    /// pending updates, health, the last committed step, rows and bytes of each table, and the step of each
    /// rank.
    ///
    /// ```
    /// # fn main() -> frugal::Result<()> {
    /// let engine = frugal::Engine::open()?;
    /// assert!(engine.metrics()?.contains("\nfrugal_steps_committed_total 0\n"));
    /// # Ok(()) }
    /// ```
    pub fn metrics(&self) -> Result<String> {
        let mut text = vec![0u8; 16384];
        loop {
            let mut size = 0;
            let (at, capacity) = (text.as_mut_ptr().cast(), text.len());
            // SAFETY: the memory has that many bytes.
            match call(|| unsafe { sys::frugal_metrics(self.handle, at, capacity, &mut size) }) {
                // The text may grow between two calls.
                Err(error) if error.kind() == ErrorKind::Overflow => text.resize(size + 1024, 0),
                Err(error) => return Err(error),
                Ok(()) => {
                    text.truncate(size - 1); // without the NUL
                    return Ok(String::from_utf8_lossy(&text).into_owned());
                }
            }
        }
    }

    /// Starts to record time spans of the engine's work. It keeps the newest `events` spans, 64 bytes each.
    /// Errors: `Exists` (a trace is already running), `InvalidArgument` (`events` is not in 1..=2^26).
    ///
    /// ```no_run
    /// # fn main() -> frugal::Result<()> {
    /// # let engine = frugal::Engine::open()?;
    /// engine.trace_start(1 << 17)?;
    /// // Train some steps.
    /// engine.trace_stop("trace.json")?;
    /// # Ok(()) }
    /// ```
    pub fn trace_start(&self, events: usize) -> Result<()> {
        // SAFETY: the call accepts any handle.
        call(|| unsafe { sys::frugal_trace_start(self.handle, events) })
    }

    /// Ends the recording and writes it to a file in Chrome's trace event format, for chrome://tracing and
    /// Perfetto. Errors: `NotFound` (no trace was started), `InvalidArgument` (the file cannot be written:
    /// [`Error::system_code`](crate::Error::system_code) is the cause; the events are kept for another call).
    pub fn trace_stop(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = c_path("the trace's path", path.as_ref())?;
        // SAFETY: the path is a C string that lives during the call.
        call(|| unsafe { sys::frugal_trace_stop(self.handle, path.as_ptr()) })
    }

    /// Ends the recording and discards it. Errors: `NotFound` (no trace was started).
    pub fn trace_forget(&self) -> Result<()> {
        // SAFETY: the call accepts a path that is NULL.
        call(|| unsafe { sys::frugal_trace_stop(self.handle, ptr::null()) })
    }

    /// Lets other processes of this user attach to this engine by [`EngineOptions::service`], until it is
    /// closed. `address` is the path of the socket that this call creates. The engine must have
    /// [`Backing::Shm`](crate::Backing::Shm). Errors: `InvalidArgument`, `Exists` (a living process serves
    /// that address, or this engine is served), `Unsupported` (this build cannot serve).
    pub fn serve(&self, address: impl AsRef<Path>) -> Result<()> {
        let address = c_path("the address", address.as_ref())?;
        // SAFETY: the address is a C string that lives during the call.
        call(|| unsafe { sys::frugal_serve(self.handle, address.as_ptr()) })
    }

    /// The handle, for calls of [`crate::sys`]. This object still owns it: after the handle is closed, calls
    /// of this object return `BadHandle`.
    pub fn as_raw(&self) -> *mut sys::frugal_engine {
        self.handle
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// Reads with an engine, and with a trainer unless that is NULL.
pub(crate) fn read(
    engine: *mut sys::frugal_engine,
    trainer: *mut sys::frugal_trainer,
    ops: &mut [LookupOp<'_>],
    timeout: Timeout,
) -> Result<()> {
    let timeout = timeout.milliseconds();
    let outcome = with_raw_ops(ops, LookupOp::raw, |raw| {
        // SAFETY: each op's pointers are those of slices whose lengths fit its counts, offsets and stride.
        // The library keeps none of them.
        call(|| unsafe { sys::frugal_read(engine, trainer, raw.as_ptr(), raw.len(), timeout) })
    });
    if outcome.is_err() {
        for op in ops {
            op.clear_found();
        }
    }
    outcome
}

macro_rules! stats {
    ($($(#[$doc:meta])+ $name:ident,)+) => {
        /// Counters since the engine was opened; times in nanoseconds.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[$doc])+ pub $name: u64,)+
        }

        impl Stats {
            fn of(raw: &sys::frugal_stats) -> Self {
                Self { $($name: raw.$name,)+ }
            }
        }
    };
}

stats! {
    /// Steps that all ranks have ended.
    steps_committed,
    /// Steps that were aborted.
    steps_aborted,
    /// Keys declared by prefetches.
    keys_declared,
    /// Keys of lookups.
    keys_looked_up,
    /// Keys looked up or pushed without a declared batch.
    keys_undeclared,
    /// Keys of pushes.
    keys_pushed,
    /// Rows created.
    rows_created,
    /// Updates (of a row, in a step) written to host rows.
    rows_updated,
    /// Of these: queued when the step after theirs could begin.
    rows_deferred,
    /// Calls of `step_begin` that had to wait.
    gate_waits,
    /// Time of these waits.
    gate_wait_ns,
    /// Gates that met an update dequeued but unwritten.
    gate_in_flight,
    /// Undeclared keys that had to wait.
    lookup_waits,
    /// Pending updates that became more urgent.
    priority_rises,
    /// Pending updates that became less urgent.
    priority_falls,
    /// Rows with pending updates, put into the queue.
    enqueued,
    /// The same, taken out of the queue.
    dequeued,
    /// Times that the budget forced writing.
    back_pressure,
    /// Calls of `step_begin` while another rank was still in an earlier step.
    ranks_apart,
    /// Rows read with a pending update (staleness > 0).
    stale_reads,
    /// Keys served from a trainer's cache.
    cache_hits,
    /// Keys that the cache did not have.
    cache_misses,
    /// Rows admitted to caches.
    cache_admitted,
    /// Rows evicted from caches.
    cache_evicted,
    /// Evicted while the host row had pending updates.
    cache_evicted_dirty,
    /// Bytes of pending updates now.
    pending_bytes,
    /// The largest value of `pending_bytes`.
    pending_bytes_peak,
    /// Rows with pending updates now.
    pending_rows,
    /// The same: rows that are only read are not counted.
    active_rows,
    /// Steps applied at once.
    modes_at_once,
    /// Steps queued.
    modes_deferred,
    /// Wall time inside lookups, summed over trainers.
    lookup_ns,
    /// The same for pushes.
    push_ns,
    /// The same for `step_begin`.
    step_begin_ns,
    /// The same for `step_end`.
    step_end_ns,
    /// The same for prefetches.
    prefetch_ns,
    /// Time spent on bookkeeping of pending updates and on the queue, summed over threads.
    entry_ns,
    /// Time spent applying updates, summed over threads.
    apply_ns,
    /// Cache refreshes: changes of a trainer's cache between two steps, one for each table.
    cache_refreshes,
    /// Of these: planned while the step before was computed.
    cache_planned,
    /// Checkpoints that are on disk.
    checkpoints,
    /// Checkpoints that failed or were cancelled.
    checkpoints_failed,
    /// Records of parameter files that were written.
    checkpoint_rows,
    /// Bytes of these files, and of blobs.
    checkpoint_bytes,
    /// Of these rows: copied by a thread that was about to change them.
    checkpoint_copies,
    /// Calls of `step_begin` that waited for the disk, since copies were over their budget.
    checkpoint_waits,
}

/// The version of the loaded library, as "major.minor.patch".
pub fn version() -> &'static str {
    // SAFETY: the function returns a static string that ends in NUL.
    let version = unsafe { std::ffi::CStr::from_ptr(sys::frugal_version()) };
    version.to_str().unwrap_or("")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stats_have_all_fields_of_the_header() {
        assert_eq!(size_of::<Stats>(), size_of::<sys::frugal_stats>() - size_of::<usize>());
        // SAFETY: a struct of integers may be zeros.
        let mut raw: sys::frugal_stats = unsafe { std::mem::zeroed() };
        raw.cache_planned = 7;
        raw.steps_committed = 5;
        let stats = Stats::of(&raw);
        assert_eq!((stats.steps_committed, stats.cache_planned), (5, 7));
    }
}
