//! Errors of failed calls.

use std::ffi::CStr;
use std::fmt;
use std::sync::OnceLock;

use frugal_sys as sys;

/// The result of a call.
pub type Result<T> = std::result::Result<T, Error>;

macro_rules! kinds {
    ($($(#[$doc:meta])+ $kind:ident = $status:ident,)+) => {
        /// What was wrong, one for each status of `frugal.h`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum ErrorKind {
            $($(#[$doc])+ $kind,)+
            /// A status of a newer library, which this crate does not know; see [`Error::status`].
            Unknown,
        }

        impl ErrorKind {
            fn of(status: i32) -> Self {
                match status {
                    $(sys::$status => Self::$kind,)+
                    _ => Self::Unknown,
                }
            }
        }
    };
}

kinds! {
    /// A value is out of its range, a slice has the wrong length, or a flag is unknown.
    InvalidArgument = FRUGAL_ERR_INVALID_ARGUMENT,
    /// The object was closed or dropped, or belongs to another engine.
    BadHandle = FRUGAL_ERR_BAD_HANDLE,
    /// The loaded library is older or newer than the header that this crate was built with.
    StructSize = FRUGAL_ERR_STRUCT_SIZE,
    /// Memory, /dev/shm or the engine's `host_bytes` is exhausted.
    OutOfMemory = FRUGAL_ERR_OUT_OF_MEMORY,
    /// An id of a dense table is not in `0..rows`.
    KeyOutOfRange = FRUGAL_ERR_KEY_OUT_OF_RANGE,
    /// The new keys of the call do not all fit.
    TableFull = FRUGAL_ERR_TABLE_FULL,
    /// A table of that name, or a trainer of that rank, exists.
    Exists = FRUGAL_ERR_EXISTS,
    /// Another step must come now; the message names it.
    StepOrder = FRUGAL_ERR_STEP_ORDER,
    /// A declared step has begun, or lies beyond the lookahead.
    StepRange = FRUGAL_ERR_STEP_RANGE,
    /// The call belongs between `step_begin` and `step_end`.
    NotInStep = FRUGAL_ERR_NOT_IN_STEP,
    /// Another rank aborted the step. Begin the step that the message names.
    StepAborted = FRUGAL_ERR_STEP_ABORTED,
    /// A rank is inside a step, or ranks have ended different steps.
    Busy = FRUGAL_ERR_BUSY,
    /// The time-out passed; the message names what the call waited for. Call again.
    Timeout = FRUGAL_ERR_TIMEOUT,
    /// A gradient has a NaN and the table rejects them.
    Nan = FRUGAL_ERR_NAN,
    /// The engine belongs to the parent of this process.
    Forked = FRUGAL_ERR_FORKED,
    /// The call is well formed, but this build or machine cannot do it.
    Unsupported = FRUGAL_ERR_UNSUPPORTED,
    /// No such table or batch.
    NotFound = FRUGAL_ERR_NOT_FOUND,
    /// A background thread failed; [`Engine::health`](crate::Engine::health) returns the failure.
    Unhealthy = FRUGAL_ERR_UNHEALTHY,
    /// The object was closed while the call waited.
    Closed = FRUGAL_ERR_CLOSED,
    /// An output buffer is too small; the call returns the needed size.
    Overflow = FRUGAL_ERR_OVERFLOW,
    /// A bug of the library; please report the message.
    Internal = FRUGAL_ERR_INTERNAL,
    /// There is no such GPU, or it failed; [`Error::device_code`] is the CUDA error.
    Device = FRUGAL_ERR_DEVICE,
    /// A trainer process or the controller is gone; the message says which.
    PeerLost = FRUGAL_ERR_PEER_LOST,
    /// A disk, a quota or the limit of a file's size is full. The message names the file.
    NoSpace = FRUGAL_ERR_NO_SPACE,
    /// A read, a write or a sync of a file failed. The message names the file.
    Io = FRUGAL_ERR_IO,
    /// Bytes of a file are not what was written there. The message names file and offset.
    Damaged = FRUGAL_ERR_DAMAGED,
    /// A later version of the library wrote the file; use that version.
    TooNew = FRUGAL_ERR_TOO_NEW,
}

/// A failed call: its kind, and a message that says what was wrong and what to do.
///
/// ```
/// use frugal::{Engine, ErrorKind};
///
/// # fn main() -> frugal::Result<()> {
/// let engine = Engine::open()?;
/// let error = engine.find_table("users").unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::NotFound);
/// assert_eq!(error.to_string(), "FRUGAL_ERR_NOT_FOUND: no table is named 'users': create it first");
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    status: i32,
    system_code: i32,
    device_code: i32,
    message: Box<str>,
}

impl Error {
    /// What was wrong.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The status of `frugal.h`, a negative number that never changes.
    pub fn status(&self) -> i32 {
        self.status
    }

    /// The status's name, for example `"FRUGAL_ERR_TIMEOUT"`.
    pub fn status_name(&self) -> &'static str {
        // SAFETY: the function accepts any number, and returns a static string that ends in NUL.
        let name = unsafe { CStr::from_ptr(sys::frugal_status_name(self.status)) };
        name.to_str().unwrap_or("FRUGAL_UNKNOWN")
    }

    /// What was wrong and what to do.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The errno of the system call that failed, or 0.
    pub fn system_code(&self) -> i32 {
        self.system_code
    }

    /// The CUDA error that caused it, or 0.
    pub fn device_code(&self) -> i32 {
        self.device_code
    }

    #[cold]
    pub(crate) fn invalid(message: String) -> Self {
        Self::own(sys::FRUGAL_ERR_INVALID_ARGUMENT, message)
    }

    /// An error of this crate, not of a call.
    fn own(status: i32, message: String) -> Self {
        Self { kind: ErrorKind::of(status), status, system_code: 0, device_code: 0, message: message.into() }
    }

    /// The error of the calling thread's last call, which returned `status`.
    #[cold]
    fn last(status: i32) -> Self {
        let mut raw = sys::frugal_error {
            status: 0,
            system_code: 0,
            device_code: 0,
            reserved: 0,
            message: std::ptr::null(),
        };
        // SAFETY: `raw` is a struct to be filled.
        unsafe { sys::frugal_last_error(&mut raw) };
        let mut error =
            Self { kind: ErrorKind::of(status), status, system_code: 0, device_code: 0, message: "".into() };
        // `raw` describes another call if this thread's last failed call did not return `status`.
        if raw.status == status && !raw.message.is_null() {
            error.system_code = raw.system_code;
            error.device_code = raw.device_code;
            // SAFETY: the message ends in NUL and lives until this thread's next call that fails.
            error.message = unsafe { CStr::from_ptr(raw.message) }.to_string_lossy().into();
        }
        error
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.status_name(), self.message)
    }
}

impl std::error::Error for Error {}

/// Turns the status that a function of `frugal-sys` has just returned in this thread into a result, with the
/// message.
///
/// This crate uses it too. A program needs it only for its own calls of [`crate::sys`].
#[inline]
pub fn check(status: i32) -> Result<()> {
    if status == sys::FRUGAL_OK { Ok(()) } else { Err(Error::last(status)) }
}

/// Makes a call of the library, except inside a log hook, where it is an error.
#[inline]
pub(crate) fn call(function: impl FnOnce() -> i32) -> Result<()> {
    if crate::log::in_hook() {
        return Err(Error::invalid("a log hook must not call the library".into()));
    }
    check(function())
}

/// Checks that the loaded library has the version, major and minor, that this crate was built with.
pub(crate) fn check_version() -> Result<()> {
    static FITS: OnceLock<bool> = OnceLock::new();
    if *FITS.get_or_init(|| fits(crate::version())) {
        return Ok(());
    }
    let message = format!(
        "the library that was loaded is version {}, but this crate was built with the header of {}.{}: \
         build it again, or load a library of that version",
        crate::version(),
        sys::FRUGAL_VERSION_MAJOR,
        sys::FRUGAL_VERSION_MINOR,
    );
    Err(Error::own(sys::FRUGAL_ERR_STRUCT_SIZE, message))
}

fn fits(version: &str) -> bool {
    let mut parts = version.split('.').map(|part| part.parse::<u32>().ok());
    [sys::FRUGAL_VERSION_MAJOR, sys::FRUGAL_VERSION_MINOR]
        .into_iter()
        .all(|part| parts.next() == Some(Some(part)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_that_fit() {
        let (major, minor) = (sys::FRUGAL_VERSION_MAJOR, sys::FRUGAL_VERSION_MINOR);
        assert!(fits(&format!("{major}.{minor}.0")));
        assert!(fits(&format!("{major}.{minor}.77-beta")));
        assert!(!fits(&format!("{major}.{}.0", minor + 1)));
        assert!(!fits(&format!("{}.{minor}.0", major + 1)));
        assert!(!fits(&format!("{major}.{minor}0.0")));
        assert!(!fits(&major.to_string()));
        assert!(!fits(""));
        assert_eq!(check_version(), Ok(()));
    }
}
