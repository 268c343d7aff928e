//! Tables: rows outside steps, and hyper-parameters.

use frugal_sys as sys;

use crate::error::{Error, Result, call};
use crate::ops::Op;
use crate::options::{KeySpace, Optimizer, OptimizerKind};
use crate::rows::{Rows, RowsMut, check_count};

/// A handle of a table: rows of one dimension with optimizer state. The engine owns the table, so dropping a
/// handle does not change it. Clones are handles of the same table.
///
/// Calls of tables are calls between steps. They see every committed step, and return
/// [`ErrorKind::Busy`](crate::ErrorKind::Busy) while a rank is inside a step or ranks have ended different
/// steps. Any number of threads may use a table at once.
///
/// ```
/// use frugal::{Engine, TableOptions};
///
/// # fn main() -> frugal::Result<()> {
/// let engine = Engine::open()?;
/// let table = engine.create_table(&TableOptions::new("items", 100, 2).hashed())?;
/// table.put(&[7, 11], &[0.5, 1.5, 2.5, 3.5])?;
/// let mut rows = [0.0; 4];
/// table.get(&[11, 7], &mut rows)?;
/// assert_eq!(rows, [2.5, 3.5, 0.5, 1.5]);
/// assert_eq!(table.count()?, 2);
/// assert_eq!(table.delete(&[7, 8])?, 1);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Table {
    handle: *mut sys::frugal_table,
    dim: usize,
}

// SAFETY: frugal.h: any number of threads may make each call that takes a table, const or not, at once. The
// handle is a number, never an address.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

/// The description that [`Table::describe`] returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TableInfo {
    /// The number of rows that exist now.
    pub rows: u64,
    /// The `rows` of the table's options.
    pub capacity: u64,
    /// Bytes of a row's elements.
    pub value_bytes: u64,
    /// Optimizer state of a row, in floats.
    pub state_floats: u64,
    /// Bytes of memory held now.
    pub memory_bytes: u64,
    /// Elements of a row.
    pub dim: u32,
    /// The keys that it may have.
    pub key_space: KeySpace,
    /// Its optimizer's kind.
    pub optimizer: OptimizerKind,
    /// The page size in bytes that the rows' memory requests.
    pub page_bytes: u32,
}

impl Table {
    pub(crate) fn of(handle: *mut sys::frugal_table) -> Result<Self> {
        let dim = describe(handle)?.dim as usize;
        Ok(Self { handle, dim })
    }

    /// Elements of a row.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Elements of a row with optimizer state, in the order of [`get_with_state`](Self::get_with_state):
    /// first those of the row, then those of the state. For a dropped table it is `dim`.
    pub fn dim_with_state(&self) -> usize {
        self.dim + describe(self.handle).map_or(0, |info| info.state_floats as usize)
    }

    /// Returns the table's options and its present size.
    pub fn describe(&self) -> Result<TableInfo> {
        let raw = describe(self.handle)?;
        let key_space = match raw.key_space as u32 {
            sys::FRUGAL_DENSE => KeySpace::Dense,
            _ => KeySpace::Hashed,
        };
        let optimizer = OptimizerKind::of(raw.optimizer).ok_or_else(|| {
            Error::invalid(format!("optimizer kind {} is of a newer library", raw.optimizer))
        })?;
        Ok(TableInfo {
            rows: raw.rows,
            capacity: raw.capacity,
            value_bytes: raw.value_bytes,
            state_floats: raw.state_floats,
            memory_bytes: raw.memory_bytes,
            dim: raw.dim,
            key_space,
            optimizer,
            page_bytes: raw.page_bytes,
        })
    }

    /// Keys for a lookup, a push, a read or a declaration; see [`Op`].
    pub fn op<'a>(&'a self, keys: &'a [u64]) -> Op<'a> {
        Op::of_keys(self, keys)
    }

    /// Counts the rows that exist. Errors: `Busy`, `Timeout`.
    pub fn count(&self) -> Result<u64> {
        let mut count = 0;
        // SAFETY: the call writes the number.
        call(|| unsafe { sys::frugal_table_count(self.handle, &mut count) })?;
        Ok(count)
    }

    /// Returns all keys, in the rows' internal order. Errors: `Busy`, `Timeout`.
    pub fn keys(&self) -> Result<Vec<u64>> {
        let mut keys = Vec::new();
        let mut cursor = 0;
        // Room for one more key, so that one call is enough if the table has not grown since count().
        let mut room = usize::try_from(self.count()?).unwrap_or(usize::MAX).saturating_add(1);
        loop {
            let done = keys.len();
            keys.resize(done + room, 0);
            let written = self.keys_from(&mut cursor, &mut keys[done..])?;
            keys.truncate(done + written);
            if written < room {
                return Ok(keys);
            }
            room = 1 << 16;
        }
    }

    /// Writes keys of existing rows to `keys`, from `cursor` on, and moves the cursor, which begins as 0.
    /// Returns the number of keys; 0 (with room for some) is the end. The order changes when rows are created
    /// or deleted. Errors: `Busy`, `Timeout`.
    pub fn keys_from(&self, cursor: &mut u64, keys: &mut [u64]) -> Result<usize> {
        let mut count = 0;
        // SAFETY: the slice has room for that many keys.
        call(|| unsafe {
            sys::frugal_table_keys(self.handle, cursor, keys.as_mut_ptr(), keys.len(), &mut count)
        })?;
        Ok(count)
    }

    /// Sets the hyper-parameters from `first_step` on, until the `first_step` of another change. The kind and
    /// `initial_accumulator` must be the table's. They may differ only between steps, before the table's
    /// first update and before rows are put with state; then all rows get the state of new rows. Errors:
    /// `InvalidArgument`, `StepRange` (`first_step` is committed), `Busy`, `Timeout`, `OutOfMemory`.
    pub fn set_optimizer(&self, first_step: u64, optimizer: &Optimizer) -> Result<()> {
        // SAFETY: the struct is complete.
        call(|| unsafe { sys::frugal_table_set_optimizer(self.handle, first_step, &optimizer.raw) })
    }

    /// Reads rows: `rows` has [`dim`](Self::dim) elements for each key. For a missing row of a hashed table
    /// these elements do not change. Creates nothing. Errors: `KeyOutOfRange`, `Busy`, `Timeout`,
    /// `InvalidArgument`.
    pub fn get<'a>(&self, keys: &[u64], rows: impl Into<RowsMut<'a>>) -> Result<()> {
        self.read_rows(keys, 0, rows.into(), None)
    }

    /// [`get`](Self::get) that writes for each key to `found` whether it has a row. After an error all are
    /// `false`.
    pub fn get_found<'a>(
        &self,
        keys: &[u64],
        rows: impl Into<RowsMut<'a>>,
        found: &mut [bool],
    ) -> Result<()> {
        self.read_rows(keys, 0, rows.into(), Some(found))
    }

    /// [`get_found`](Self::get_found) of rows with their optimizer state: `rows` has
    /// [`dim_with_state`](Self::dim_with_state) elements for each key.
    pub fn get_with_state<'a>(
        &self,
        keys: &[u64],
        rows: impl Into<RowsMut<'a>>,
        found: &mut [bool],
    ) -> Result<()> {
        self.read_rows(keys, sys::FRUGAL_WITH_STATE, rows.into(), Some(found))
    }

    /// [`get_found`](Self::get_found) of rows as of the last committed step, also while ranks are inside
    /// steps.
    pub fn get_committed<'a>(
        &self,
        keys: &[u64],
        rows: impl Into<RowsMut<'a>>,
        found: &mut [bool],
    ) -> Result<()> {
        self.read_rows(keys, sys::FRUGAL_COMMITTED, rows.into(), Some(found))
    }

    /// [`get_committed`](Self::get_committed) of rows with their optimizer state, as in
    /// [`get_with_state`](Self::get_with_state).
    pub fn get_committed_with_state<'a>(
        &self,
        keys: &[u64],
        rows: impl Into<RowsMut<'a>>,
        found: &mut [bool],
    ) -> Result<()> {
        let flags = sys::FRUGAL_COMMITTED | sys::FRUGAL_WITH_STATE;
        self.read_rows(keys, flags, rows.into(), Some(found))
    }

    fn read_rows(
        &self,
        keys: &[u64],
        flags: u32,
        mut rows: RowsMut<'_>,
        mut found: Option<&mut [bool]>,
    ) -> Result<()> {
        let outcome = (|| {
            let (out, stride) = rows.raw("rows", keys.len(), self.width(flags))?;
            let mut found_out = std::ptr::null_mut();
            if let Some(found) = found.as_deref_mut() {
                check_count("found", found.len(), keys.len(), "keys")?;
                found_out = found.as_mut_ptr().cast();
            }
            // SAFETY: the slices' lengths fit keys, flags and stride. On success `found` has only 0s and 1s.
            call(|| unsafe {
                sys::frugal_get(self.handle, keys.as_ptr(), keys.len(), flags, out, stride, found_out)
            })
        })();
        if let (Err(_), Some(found)) = (&outcome, found) {
            clear(found);
        }
        outcome
    }

    /// Writes rows, and creates the missing ones. Their optimizer state becomes that of new rows. If a key
    /// comes twice, its last row counts. Errors: `KeyOutOfRange`, `TableFull` or `OutOfMemory` (nothing is
    /// written), `Busy`, `Timeout`, `InvalidArgument`.
    pub fn put<'a>(&self, keys: &[u64], rows: impl Into<Rows<'a>>) -> Result<()> {
        self.write_rows(keys, 0, rows.into())
    }

    /// [`put`](Self::put) of rows with their optimizer state: [`dim_with_state`](Self::dim_with_state)
    /// elements each.
    pub fn put_with_state<'a>(&self, keys: &[u64], rows: impl Into<Rows<'a>>) -> Result<()> {
        self.write_rows(keys, sys::FRUGAL_WITH_STATE, rows.into())
    }

    fn write_rows(&self, keys: &[u64], flags: u32, rows: Rows<'_>) -> Result<()> {
        let (from, stride) = rows.raw("rows", keys.len(), self.width(flags))?;
        // SAFETY: the slices' lengths fit keys, flags and stride.
        call(|| unsafe { sys::frugal_put(self.handle, keys.as_ptr(), keys.len(), flags, from, stride) })
    }

    fn width(&self, flags: u32) -> usize {
        if flags & sys::FRUGAL_WITH_STATE == 0 { self.dim } else { self.dim_with_state() }
    }

    /// Deletes rows and returns how many existed. Rows of a dense table return to their initial values and
    /// state. Errors: `KeyOutOfRange`, `Busy`, `Timeout`.
    pub fn delete(&self, keys: &[u64]) -> Result<u64> {
        let mut deleted = 0;
        // SAFETY: the slice has that many keys.
        call(|| unsafe { sys::frugal_delete(self.handle, keys.as_ptr(), keys.len(), &mut deleted) })?;
        Ok(deleted)
    }

    /// Drops the table itself and frees its memory (`frugal_table_drop`). Declared batches lose their parts
    /// of this table, and calls with its handles return `BadHandle`. After an error nothing has changed.
    /// Errors: `Busy`, `Timeout`.
    pub fn drop_table(&self) -> Result<()> {
        // SAFETY: any handle may be dropped.
        call(|| unsafe { sys::frugal_table_drop(self.handle) })
    }

    /// The handle, for calls of [`crate::sys`].
    pub fn as_raw(&self) -> *mut sys::frugal_table {
        self.handle
    }
}

fn describe(handle: *mut sys::frugal_table) -> Result<sys::frugal_table_info> {
    // SAFETY: a struct of integers may be zeros.
    let mut raw: sys::frugal_table_info = unsafe { std::mem::zeroed() };
    raw.struct_size = size_of_val(&raw);
    // SAFETY: the call fills the struct, whose size is set.
    call(|| unsafe { sys::frugal_table_describe(handle, &mut raw) })?;
    Ok(raw)
}

/// Sets flags to `false`. A failed call may have left them undefined, which a bool must not be; so this only
/// writes them.
pub(crate) fn clear(found: &mut [bool]) {
    // SAFETY: the slice is writable, and 0 is `false`.
    unsafe { std::ptr::write_bytes(found.as_mut_ptr(), 0, found.len()) }
}
