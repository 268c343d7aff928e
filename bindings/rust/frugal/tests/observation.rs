//! Observation of an engine: metrics and traces. Also: services.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use frugal::*;

/// A folder that the end of the test removes.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("frugal_{name}_{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn train(engine: &Engine, steps: u64) {
    let table = engine.create_table(&TableOptions::new("users", 100, 4)).unwrap();
    let mut trainer = engine.create_trainer(&TrainerOptions::new(0)).unwrap();
    let keys: Vec<u64> = (0..40).collect();
    let mut rows = vec![0.0; 40 * 4];
    for step in 0..steps {
        let batch = trainer.prefetch(step, table.op(&keys)).unwrap();
        trainer.step_begin(step).unwrap();
        trainer.lookup(&batch, &mut rows).unwrap();
        trainer.push_grad(&batch, &rows).unwrap();
        trainer.step_end(step).unwrap();
    }
    engine.flush().unwrap();
}

#[track_caller]
fn kind<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    result.unwrap_err().kind()
}

/// Whether the text may be JSON. The standard library has no parser: this skips strings and matches brackets.
fn nests(text: &str) -> bool {
    let mut open = Vec::new();
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => loop {
                match bytes.next() {
                    Some(b'\\') => drop(bytes.next()),
                    Some(b'"') => break,
                    Some(control) if control < 0x20 => return false,
                    Some(_) => {}
                    None => return false,
                }
            },
            b'{' => open.push(b'}'),
            b'[' => open.push(b']'),
            b'}' | b']' if open.pop() != Some(byte) => return false,
            _ => {}
        }
    }
    open.is_empty()
}

#[test]
fn a_trace_has_the_spans_of_a_training() {
    let folder = Folder::new("spans");
    let path = folder.0.join("trace.json");
    let engine = Engine::open().unwrap();
    engine.trace_start(10_000).unwrap();
    assert_eq!(kind(engine.trace_start(10_000)), ErrorKind::Exists);
    train(&engine, 10);
    engine.trace_stop(&path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let text = fs::read_to_string(&path).unwrap();
    assert!(nests(&text));
    // An event is a line.
    for name in ["prefetch", "step_begin", "gate", "lookup", "push", "step_end"] {
        for step in 0..10 {
            let events = text.lines().filter(|line| {
                line.contains(&format!("\"name\":\"{name}\",")) && line.contains(&format!("\"step\":{step},"))
            });
            assert_eq!(events.count(), 1, "{name} of step {step}");
        }
    }
    assert!(text.contains("\"keys\":40"));
    assert!(text.contains("\"table\":\"users\""));
    assert!(text.contains("\"args\":{\"name\":\"rank 0\"}"));
}

#[test]
fn traces_that_cannot_be() {
    let folder = Folder::new("refused");
    let engine = Engine::open().unwrap();
    assert_eq!(kind(engine.trace_forget()), ErrorKind::NotFound);
    assert_eq!(kind(engine.trace_start(0)), ErrorKind::InvalidArgument);
    engine.trace_start(1).unwrap();
    let error = engine.trace_stop(folder.0.join("none/t")).unwrap_err();
    assert_eq!((error.kind(), error.system_code()), (ErrorKind::InvalidArgument, 2)); // ENOENT
    assert_eq!(kind(engine.trace_stop("a\0b")), ErrorKind::InvalidArgument);
    engine.trace_forget().unwrap();
    assert_eq!(kind(engine.trace_stop(folder.0.join("t"))), ErrorKind::NotFound);
    assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 0);
}

#[test]
fn every_line_of_the_metrics() {
    let engine = Engine::open().unwrap();
    train(&engine, 10);
    let text = engine.metrics().unwrap();
    assert!(text.ends_with('\n'));
    let mut samples = HashMap::new();
    let mut family = "";
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            assert!(name.starts_with("frugal_") && !help.is_empty(), "{line}");
            family = name;
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let kind = if family.ends_with("_total") { "counter" } else { "gauge" };
            assert_eq!(rest, format!("{family} {kind}"));
        } else {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert_eq!(name.split('{').next(), Some(family), "{line}");
            assert!(value.parse::<f64>().is_ok(), "{line}");
            assert!(samples.insert(name, value).is_none(), "{line}");
        }
    }
    assert_eq!(samples["frugal_steps_committed_total"], "10");
    assert_eq!(samples["frugal_keys_pushed_total"], "400");
    assert_eq!(samples["frugal_health"], "0");
    assert_eq!(samples["frugal_committed_step"], "9");
    assert_eq!(samples["frugal_table_rows{table=\"users\"}"], "100");
    assert!(samples["frugal_lookup_seconds_total"].parse::<f64>().unwrap() > 0.0);
}

#[test]
fn metrics_longer_than_a_first_guess() {
    let engine = Engine::open().unwrap();
    for i in 0..200 {
        engine.create_table(&TableOptions::new(format!("{i} {}", "x".repeat(200)), 1, 1)).unwrap();
    }
    let text = engine.metrics().unwrap();
    assert_eq!(text.matches("frugal_table_rows{").count(), 200);
}

// One engine is served, another one is attached to it. A panic gives a trainer's rank up, and the other
// rank's calls report that. A trainer that is dropped without a panic leaves, and no rank waits for it.
#[test]
fn a_rank_that_panics_is_waited_for() {
    let folder = Folder::new("panics");
    let address = folder.0.join("socket");
    let options = || EngineOptions::new().world_size(2).timeout(Duration::from_secs(60));
    let host = options().backing(Backing::Shm).open().unwrap();
    match host.serve(&address) {
        Err(error) if error.kind() == ErrorKind::Unsupported => return, // built without trainers as processes
        outcome => outcome.unwrap(),
    }
    let mut here = host.create_trainer(&TrainerOptions::new(0)).unwrap();
    let attached = options().service(&address).open().unwrap();
    let join = || attached.create_trainer(&TrainerOptions::new(1)).unwrap();
    let mut step = |number| {
        here.step_begin_within(number, Duration::from_millis(200))?;
        here.step_end(number)
    };
    let mut other = join();
    other.step_begin(0).unwrap();
    other.step_end(0).unwrap();
    step(0).unwrap();
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        let _other = other;
        panic!("on purpose");
    }));
    assert!(outcome.is_err());
    assert_eq!(kind(step(1)), ErrorKind::PeerLost);
    assert_eq!(kind(step(1)), ErrorKind::Timeout);
    join().abandon().unwrap();
    assert_eq!(kind(step(1)), ErrorKind::PeerLost);
    drop(join());
    step(1).unwrap();
    step(2).unwrap();
}

#[test]
fn services_that_are_not_there() {
    let nobody = EngineOptions::new().service("/tmp/no such service").timeout(Duration::from_millis(100));
    let error = nobody.open().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Unsupported), "{error}");
    assert!(error.message().contains("/tmp/no such service"), "{error}");
    assert_eq!(kind(EngineOptions::new().log(|_, _| {}).service("a\0b").open()), ErrorKind::InvalidArgument);
    let engine = EngineOptions::new().backing(Backing::Shm).open().unwrap();
    assert!(engine.serve("/no such folder/service").is_err());
    assert_eq!(kind(engine.serve("a\0b")), ErrorKind::InvalidArgument);
    assert_eq!(kind(engine.create_trainer(&TrainerOptions::new(0).replace(true))), ErrorKind::Unsupported);
    train(&engine, 1);
}
