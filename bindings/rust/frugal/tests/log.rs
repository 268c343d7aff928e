//! The engine calls the log hook when it lacks memory for a cache.

use std::sync::{Arc, Mutex, PoisonError};

use frugal::*;

/// A test holds it while it has an engine: the memory limit, and memory that another test frees, are the
/// process's.
static ONE: Mutex<()> = Mutex::new(());

#[repr(C)]
struct Limit {
    soft: u64,
    hard: u64,
}

unsafe extern "C" {
    fn getrlimit(resource: i32, limit: *mut Limit) -> i32;
    fn setrlimit(resource: i32, limit: *const Limit) -> i32;
}

const ADDRESS_SPACE: i32 = 9; // RLIMIT_AS of Linux

/// The size in bytes of this process's address space.
fn address_space() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// Uses a table whose cache would be larger than the remaining memory. Returns a value that a lookup read.
fn make_a_line(engine: &Engine) -> f32 {
    let options = TableOptions::new("large", 1 << 20, 2048).lazy(true).init(Init::Constant(2.0));
    let table = engine.create_table(&options).unwrap();
    let mut limit = Limit { soft: 0, hard: 0 };
    // SAFETY: the first call fills the limit, the second gets a valid one.
    unsafe {
        assert_eq!(getrlimit(ADDRESS_SPACE, &mut limit), 0);
        // The cache requests 8 GiB.
        let tight = Limit { soft: address_space() + (4 << 30), hard: limit.hard };
        assert_eq!(setrlimit(ADDRESS_SPACE, &tight), 0);
    }
    let mut trainer = engine.create_trainer(&TrainerOptions::new(0).cache_ratio(1.0)).unwrap();
    let batch = trainer.prefetch(0, table.op(&[1])).unwrap();
    trainer.step_begin(0).unwrap();
    let mut row = vec![0.0; 2048];
    trainer.lookup(&batch, &mut row).unwrap();
    trainer.step_end(0).unwrap();
    // SAFETY: the limit is valid.
    assert_eq!(unsafe { setrlimit(ADDRESS_SPACE, &limit) }, 0);
    row[0]
}

#[test]
fn lines_reach_the_closure() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let lines = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&lines);
    let hook = move |level, text: &str| seen.lock().unwrap().push((level, text.to_owned()));
    let engine = EngineOptions::new().log(hook).open().unwrap();
    assert_eq!(make_a_line(&engine), 2.0);
    engine.close().unwrap();
    let lines = lines.lock().unwrap();
    assert!(!lines.is_empty());
    assert_eq!(lines[0].0, LogLevel::Warning);
    assert!(lines[0].1.contains("no memory"), "{lines:?}");
}

#[test]
fn a_panic_in_the_closure_stops_nothing() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let calls = Arc::new(Mutex::new(0));
    let counted = Arc::clone(&calls);
    let hook = move |_, _: &str| {
        *counted.lock().unwrap() += 1;
        panic!("in the hook, on purpose");
    };
    let engine = EngineOptions::new().log(hook).open().unwrap();
    assert_eq!(make_a_line(&engine), 2.0);
    engine.health().unwrap();
    assert!(*calls.lock().unwrap() > 0);
}
