//! Rows in the caller's memory, and keys of other types.

use crate::error::{Error, Result};

/// Rows to read: a slice, packed or with a stride. Most calls take any type that converts to it: `&[f32]`,
/// `&Vec<f32>`, `&[f32; N]`.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    data: &'a [f32],
    stride: usize,
}

/// Rows to write: a slice, packed or with a stride. Most calls take any type that converts to it:
/// `&mut [f32]`, `&mut Vec<f32>`, `&mut [f32; N]`.
#[derive(Debug)]
pub struct RowsMut<'a> {
    data: &'a mut [f32],
    stride: usize,
}

impl<'a> Rows<'a> {
    /// Row i begins at element `i * stride`, as in columns of a wider matrix. The slice may end after the
    /// last row. `stride` is at least the number of elements of a row; 0 means packed.
    pub fn strided(data: &'a [f32], stride: usize) -> Self {
        Self { data, stride }
    }

    /// Their address and stride in bytes, if they are `rows` rows of `width` elements.
    pub(crate) fn raw(&self, what: &str, rows: usize, width: usize) -> Result<(*const f32, usize)> {
        let bytes = check_length(what, self.data.len(), self.stride, rows, width)?;
        Ok((self.data.as_ptr(), bytes))
    }
}

impl<'a> RowsMut<'a> {
    /// Row i begins at element `i * stride`, as in columns of a wider matrix. The elements between rows do
    /// not change. The slice may end after the last row. `stride` is at least the number of elements of a
    /// row; 0 means packed.
    ///
    /// ```
    /// use frugal::{Engine, Init, RowsMut, TableOptions};
    ///
    /// # fn main() -> frugal::Result<()> {
    /// let engine = Engine::open()?;
    /// let table = engine.create_table(&TableOptions::new("users", 10, 2).init(Init::Constant(1.0)))?;
    /// let mut matrix = [0.0; 9]; // 3 x 3: the rows go into the last two columns
    /// table.get(&[4, 5, 6], RowsMut::strided(&mut matrix[1..], 3))?;
    /// assert_eq!(matrix, [0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]);
    /// # Ok(()) }
    /// ```
    pub fn strided(data: &'a mut [f32], stride: usize) -> Self {
        Self { data, stride }
    }

    /// Their address and stride in bytes, if they are `rows` rows of `width` elements.
    pub(crate) fn raw(&mut self, what: &str, rows: usize, width: usize) -> Result<(*mut f32, usize)> {
        let bytes = check_length(what, self.data.len(), self.stride, rows, width)?;
        Ok((self.data.as_mut_ptr(), bytes))
    }
}

impl<'a> From<&'a [f32]> for Rows<'a> {
    fn from(data: &'a [f32]) -> Self {
        Self { data, stride: 0 }
    }
}

impl<'a> From<&'a Vec<f32>> for Rows<'a> {
    fn from(data: &'a Vec<f32>) -> Self {
        Self { data, stride: 0 }
    }
}

impl<'a, const N: usize> From<&'a [f32; N]> for Rows<'a> {
    fn from(data: &'a [f32; N]) -> Self {
        Self { data, stride: 0 }
    }
}

impl<'a> From<&'a mut [f32]> for RowsMut<'a> {
    fn from(data: &'a mut [f32]) -> Self {
        Self { data, stride: 0 }
    }
}

impl<'a> From<&'a mut Vec<f32>> for RowsMut<'a> {
    fn from(data: &'a mut Vec<f32>) -> Self {
        Self { data, stride: 0 }
    }
}

impl<'a, const N: usize> From<&'a mut [f32; N]> for RowsMut<'a> {
    fn from(data: &'a mut [f32; N]) -> Self {
        Self { data, stride: 0 }
    }
}

/// Checks that `rows` rows of `width` elements are in `length` elements. Returns the stride in bytes. Packed
/// rows must fill the slice, so that a wrong shape is an error.
fn check_length(what: &str, length: usize, stride: usize, rows: usize, width: usize) -> Result<usize> {
    let too_large = || Error::invalid(format!("{what}: {rows} rows exceed the address space"));
    let bytes = stride.checked_mul(size_of::<f32>()).ok_or_else(too_large)?;
    if stride == 0 {
        let need = rows.checked_mul(width).ok_or_else(too_large)?;
        if length != need {
            return Err(Error::invalid(format!(
                "{what} has {length} elements; {rows} rows of {width} have {need}"
            )));
        }
    } else if rows > 0 {
        let need = (rows - 1).checked_mul(stride).and_then(|n| n.checked_add(width)).ok_or_else(too_large)?;
        if stride < width || length < need {
            return Err(Error::invalid(format!(
                "{what} has {length} elements; {rows} rows of {width} with stride {stride} need {need}, \
                 and a stride of at least {width}"
            )));
        }
    }
    Ok(bytes)
}

/// Checks the length of a slice with one element for each of `count` things.
pub(crate) fn check_count(what: &str, length: usize, count: usize, of: &str) -> Result<()> {
    if length == count {
        return Ok(());
    }
    Err(Error::invalid(format!("{what} has {length} elements, but there are {count} {of}")))
}

/// Converts signed ids, as other libraries have them, to keys: the same memory and the same bits. A negative
/// id is a large key. For a dense table it is [`ErrorKind::KeyOutOfRange`](crate::ErrorKind::KeyOutOfRange);
/// a hashed table accepts it.
pub fn as_keys(ids: &[i64]) -> &[u64] {
    // SAFETY: i64 and u64 have the same size and alignment, and every bit pattern is a value of both.
    unsafe { std::slice::from_raw_parts(ids.as_ptr().cast(), ids.len()) }
}
