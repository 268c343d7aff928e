//! The engine: what owns tables and threads.

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

/// An opened engine. It owns tables, rows and threads in the background; dropping it closes it.
///
/// # Life
///
/// Closing an engine writes what is pending and frees everything. [`Table`], [`Trainer`] and [`Batch`](crate::Batch)
/// do not borrow the engine, and do not keep it open: they are handles with a generation. One that outlives its
/// engine answers [`ErrorKind::BadHandle`](crate::ErrorKind::BadHandle), and any order of drops will do. So a
/// trainer can move into a thread that nobody waits for, closing happens where one can see it, and a thread that
/// waits in a step when the engine is closed (its owner may be unwinding from a panic) wakes up with
/// [`ErrorKind::Closed`](crate::ErrorKind::Closed) instead of keeping engine and thread alive. Threads that share the
/// engine itself take `&Engine` in a scope, or an `Arc<Engine>`.
///
/// An engine that is forgotten ([`std::mem::forget`]) stays open until the process ends: nothing in it points into
/// the caller's memory. In a child made by `fork` calls answer [`ErrorKind::Forked`](crate::ErrorKind::Forked) and
/// drops do nothing.
///
/// # Threads
///
/// An engine may be used by any number of threads at once.
#[derive(Debug)]
pub struct Engine {
    handle: *mut sys::frugal_engine,
    hook: Option<usize>,
}

// SAFETY: frugal.h: a const handle may be used by any number of threads at once, and the calls that take an engine as
// non-const (table_create, trainer_create, close) are made by any thread. The handle is a number, never an address.
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
        // SAFETY: the config is complete; its hook may be called by any thread and does not unwind. The address of
        // the service lives during the call.
        let opened = call(|| unsafe { sys::frugal_open(&config, &mut handle) });
        if let (Err(_), Some(number)) = (&opened, hook) {
            log::remove(number);
        }
        opened.map(|()| Self { handle, hook })
    }

    /// Closes the engine: writes what is pending and frees everything, the tables, too. A step that some rank is
    /// inside of is lost; calls of other threads that wait answer `Closed`. Dropping does the same and tells no
    /// error. Errors: `Forked` (nothing happens).
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
        // Else, in a forked child or inside a hook, the engine may still have it, and the closure stays.
        if let Some(number) = self.hook.take() {
            log::remove(number);
        }
        Ok(())
    }

    /// Tells the first failure of a thread in the background, which every later call reports as `Unhealthy`.
    pub fn health(&self) -> Result<()> {
        // SAFETY: any handle may be asked.
        call(|| unsafe { sys::frugal_health(self.handle) })
    }

    /// Waits until every update of every committed step is in the host rows, and helps. Errors: `Timeout`, `Unhealthy`.
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
        // SAFETY: the number is there to be filled.
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

    /// The names of all tables, those of other processes and languages, too, in the order of their creation.
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

    /// Joins as a rank, which leaves when the trainer is dropped. Errors: `InvalidArgument`, `Exists` (the rank is
    /// taken), `Busy`, `Device`, `OutOfMemory`, `Timeout`.
    pub fn create_trainer(&self, options: &TrainerOptions) -> Result<Trainer> {
        let mut trainer = ptr::null_mut();
        // SAFETY: the raw struct is complete, and its device lives during the call.
        options.with_raw(|raw| unsafe { sys::frugal_trainer_create(self.handle, raw, &mut trainer) })?;
        Ok(Trainer::of(trainer, self.handle, options.rank()))
    }

    /// Reads rows for evaluation or serving, outside steps: creates no row and declares nothing. Keys that are missing
    /// read as zeros. It is an operation outside steps; [`Trainer::read`] is one inside them. Errors:
    /// `KeyOutOfRange`, `Busy` (a rank is inside a step), `Timeout`, `InvalidArgument`.
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
        // SAFETY: the struct has its size and is there to be filled.
        call(|| unsafe { sys::frugal_get_stats(self.handle, &mut raw) })?;
        Ok(Stats::of(&raw))
    }

    /// The text that a scrape of Prometheus wants (text exposition format 0.0.4): all of [`stats`](Self::stats), what
    /// is pending, health, the last committed step, rows and bytes of each table, and the step of each rank.
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
                // It may grow between two calls.
                Err(error) if error.kind() == ErrorKind::Overflow => text.resize(size + 1024, 0),
                Err(error) => return Err(error),
                Ok(()) => {
                    text.truncate(size - 1); // without the NUL
                    return Ok(String::from_utf8_lossy(&text).into_owned());
                }
            }
        }
    }

    /// Begins to record what the engine does when: the newest `events` spans are kept, in 64 bytes each. Errors:
    /// `Exists` (there is a trace that was not stopped), `InvalidArgument` (1 to 2^26 events).
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
        // SAFETY: any handle may be asked.
        call(|| unsafe { sys::frugal_trace_start(self.handle, events) })
    }

    /// Ends the recording and writes it to a file in Chrome's trace event format, for chrome://tracing and Perfetto.
    /// Errors: `NotFound` (no trace was started), `InvalidArgument` (the file cannot be written:
    /// [`Error::system_code`](crate::Error::system_code) tells why; the events are kept for another call).
    pub fn trace_stop(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = c_path("the trace's path", path.as_ref())?;
        // SAFETY: the path is a C string that lives during the call.
        call(|| unsafe { sys::frugal_trace_stop(self.handle, path.as_ptr()) })
    }

    /// Ends the recording and forgets it. Errors: `NotFound` (no trace was started).
    pub fn trace_forget(&self) -> Result<()> {
        // SAFETY: NULL is a path that the call knows.
        call(|| unsafe { sys::frugal_trace_stop(self.handle, ptr::null()) })
    }

    /// Lets other processes of this user attach to this engine by [`EngineOptions::service`], until it is closed.
    /// `address` is the path of a socket, which is made there. The engine must have
    /// [`Backing::Shm`](crate::Backing::Shm). Errors: `InvalidArgument`, `Exists` (that address is served, or this
    /// engine is), `Unsupported` (this build cannot serve).
    pub fn serve(&self, address: impl AsRef<Path>) -> Result<()> {
        let address = c_path("the address", address.as_ref())?;
        // SAFETY: the address is a C string that lives during the call.
        call(|| unsafe { sys::frugal_serve(self.handle, address.as_ptr()) })
    }

    /// The handle, for calls of [`crate::sys`]. It stays this object's: closing it makes this object's calls answer
    /// `BadHandle`.
    pub fn as_raw(&self) -> *mut sys::frugal_engine {
        self.handle
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// Reads by way of an engine, and of a trainer if that is not NULL.
pub(crate) fn read(
    engine: *mut sys::frugal_engine,
    trainer: *mut sys::frugal_trainer,
    ops: &mut [LookupOp<'_>],
    timeout: Timeout,
) -> Result<()> {
    let timeout = timeout.milliseconds();
    let outcome = with_raw_ops(ops, LookupOp::raw, |raw| {
        // SAFETY: each op's pointers are of slices with the lengths that its counts, offsets and stride want, and
        // the library keeps none of them.
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
        /// Counters since the engine was opened; times in nanoseconds. A g-entry is a row's pending updates.
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
    /// A pending update became more urgent.
    priority_rises,
    /// A pending update became less urgent.
    priority_falls,
    /// G-entries put into the queue.
    enqueued,
    /// G-entries taken out of the queue.
    dequeued,
    /// Times that the budget forced writing.
    back_pressure,
    /// Calls of `step_begin` while another rank was still in an earlier step.
    ranks_apart,
    /// Rows read with a pending update (staleness > 0).
    stale_reads,
    /// Keys served from a trainer's cache.
    cache_hits,
    /// Keys that it did not have.
    cache_misses,
    /// Rows taken into caches.
    cache_admitted,
    /// Rows that left caches.
    cache_evicted,
    /// Evicted while the host row had pending updates.
    cache_evicted_dirty,
    /// Bytes of pending updates now.
    pending_bytes,
    /// The most that these were.
    pending_bytes_peak,
    /// G-entries with pending updates now.
    pending_rows,
    /// The same: g-entries of rows that are only read are not counted.
    active_rows,
    /// Steps applied at once.
    modes_at_once,
    /// Steps queued.
    modes_deferred,
    /// Wall time inside lookups, summed over trainers.
    lookup_ns,
    /// The same, of pushes.
    push_ns,
    /// The same, of `step_begin`.
    step_begin_ns,
    /// The same, of `step_end`.
    step_end_ns,
    /// The same, of prefetches.
    prefetch_ns,
    /// Time spent on g-entries and queue.
    entry_ns,
    /// Time spent applying updates, over threads.
    apply_ns,
    /// Step boundaries of trainers' caches, one for each table.
    cache_refreshes,
    /// Of these: worked out while the step before was computed.
    cache_planned,
}

/// The version of the library that is loaded, as "major.minor.patch".
pub fn version() -> &'static str {
    // SAFETY: what comes is a static string that ends in NUL.
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
