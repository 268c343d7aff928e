//! The log hook: a closure that threads of the engine call.
//!
//! The engine gets a number, not an address, as its hook's context. So a line that comes after the closure
//! was freed does no harm: it finds no closure.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

/// The severity of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum LogLevel {
    /// A failure, for example of a background thread.
    Error,
    /// The engine continues without something, for example without a cache that memory lacks for.
    Warning,
    /// Information.
    Information,
}

pub(crate) type Hook = Arc<dyn Fn(LogLevel, &str) + Send + Sync>;

struct Hooks {
    next: usize,
    by_number: BTreeMap<usize, Hook>,
}

static HOOKS: Mutex<Hooks> = Mutex::new(Hooks { next: 1, by_number: BTreeMap::new() });

thread_local! {
    static IN_HOOK: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is inside a log hook.
#[inline]
pub(crate) fn in_hook() -> bool {
    IN_HOOK.get()
}

/// Registers a hook for the engine's threads. Returns its number.
pub(crate) fn add(hook: Hook) -> usize {
    let mut hooks = HOOKS.lock().unwrap_or_else(PoisonError::into_inner);
    let number = hooks.next;
    hooks.next += 1;
    hooks.by_number.insert(number, hook);
    number
}

/// Removes a hook. Its closure is freed when no thread is inside it any more.
pub(crate) fn remove(number: usize) {
    let gone = HOOKS.lock().unwrap_or_else(PoisonError::into_inner).by_number.remove(&number);
    // After the lock was released: the closure's own drop may log, open or close.
    drop(gone);
}

/// The function that the engine calls; `context` is the hook's number.
pub(crate) unsafe extern "C" fn trampoline(context: *mut c_void, level: i32, text: *const c_char) {
    struct Inside(bool);
    impl Drop for Inside {
        fn drop(&mut self) {
            IN_HOOK.set(self.0);
        }
    }
    let _inside = Inside(IN_HOOK.replace(true));
    let hook =
        HOOKS.lock().unwrap_or_else(PoisonError::into_inner).by_number.get(&(context as usize)).cloned();
    let Some(hook) = hook else { return };
    contain(|| {
        let level = match level {
            0 => LogLevel::Error,
            1 => LogLevel::Warning,
            _ => LogLevel::Information,
        };
        // SAFETY: the engine's text ends in NUL and lives during the call.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
        hook(level, &text);
    });
    // This may be the last reference, which frees the closure: also inside the hook, and with a drop that may
    // panic.
    contain(|| drop(hook));
}

/// Catches a panic, and one of its payload's drop: neither may unwind into C.
fn contain(function: impl FnOnce()) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(function)) {
        std::mem::forget(payload);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn line(number: usize) {
        // SAFETY: the text is a C string.
        unsafe { trampoline(number as *mut c_void, 1, c"a line".as_ptr()) };
    }

    #[test]
    fn a_hook_gets_level_and_text_until_it_is_removed() {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&lines);
        let number = add(Arc::new(move |level, text| seen.lock().unwrap().push((level, text.to_owned()))));
        line(number);
        remove(number);
        line(number); // as from a late thread
        assert_eq!(*lines.lock().unwrap(), [(LogLevel::Warning, "a line".to_owned())]);
        assert_eq!(Arc::strong_count(&lines), 1, "the closure was freed");
    }

    #[test]
    fn a_panic_ends_at_the_boundary() {
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let number = add(Arc::new(move |_, _| {
            counted.fetch_add(1, Ordering::Relaxed);
            panic!("in a hook, on purpose");
        }));
        line(number);
        line(number);
        remove(number);
        assert_eq!(calls.load(Ordering::Relaxed), 2);
        assert!(!in_hook(), "the thread has left the hook");
    }

    #[test]
    fn a_hook_cannot_call_the_library() {
        let told = Arc::new(Mutex::new(None));
        let tell = Arc::clone(&told);
        let number = add(Arc::new(move |_, _| {
            *tell.lock().unwrap() = Some(crate::Engine::open().map(drop));
        }));
        line(number);
        remove(number);
        let error = told.lock().unwrap().take().unwrap().unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::InvalidArgument);
        assert!(crate::Engine::open().is_ok(), "outside it can");
    }

    #[test]
    fn a_hook_that_ends_with_its_line_is_freed_inside_it() {
        struct NoteDrop(Arc<Mutex<Option<crate::Result<()>>>>);
        impl Drop for NoteDrop {
            fn drop(&mut self) {
                *self.0.lock().unwrap() = Some(crate::Engine::open().map(drop));
                panic!("in a drop, on purpose");
            }
        }
        let told = Arc::new(Mutex::new(None));
        let note = NoteDrop(Arc::clone(&told));
        let number = Arc::new(AtomicUsize::new(0));
        let own = Arc::clone(&number);
        let added = add(Arc::new(move |_, _| {
            let _ = &note;
            remove(own.load(Ordering::Relaxed)); // as another thread might meanwhile
            panic!("in a hook, on purpose");
        }));
        number.store(added, Ordering::Relaxed);
        line(added);
        let error = told.lock().unwrap().take().expect("the closure was freed").unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::InvalidArgument);
        assert!(!in_hook(), "the thread has left the hook");
    }
}
