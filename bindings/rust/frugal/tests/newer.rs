//! The crate with a later library than the one that it was built with: newer.c, loaded before the real one.

mod preload;

use std::env;

use frugal::*;

const TEST: &str = "a_later_library_is_used_or_refused";
const VERSION: &str = "FRUGAL_TEST_VERSION";
const NEWER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/newer.c");

#[test]
fn a_later_library_is_used_or_refused() {
    let ours = format!("{}.{}.", sys::FRUGAL_VERSION_MAJOR, sys::FRUGAL_VERSION_MINOR);
    if let Ok(version) = env::var(VERSION) {
        assert_eq!(frugal::version(), version, "the later library was not loaded");
        return if version.starts_with(&ours) { used() } else { refused(&version) };
    }
    preload::compile(NEWER, "libnewer.so", &[]);
    let later = format!("{}.{}.0", sys::FRUGAL_VERSION_MAJOR, sys::FRUGAL_VERSION_MINOR + 1);
    for version in [format!("{ours}99"), later] {
        preload::run_again(TEST, "libnewer.so", VERSION, version);
    }
}

/// Structs have grown: the crate cuts off the fields that it does not know.
fn used() {
    let engine = EngineOptions::new().world_size(1).open().unwrap();
    let plain = engine.create_table(&TableOptions::new("plain", 100, 4)).unwrap();
    let options = TableOptions::new("t", 100, 4).optimizer(Optimizer::sgd(0.5));
    let table = engine.create_table(&options).unwrap();
    table.set_optimizer(0, &Optimizer::sgd(1.0)).unwrap();
    assert!(memory_needed(&EngineOptions::new(), &options, 0).unwrap().total > 0);
    let mut trainer = engine.create_trainer(&TrainerOptions::new(0)).unwrap();
    trainer.step_begin(0).unwrap();
    trainer.push_grad(table.op(&[1]), &[1.0; 4]).unwrap();
    trainer.push_grad(plain.op(&[1]), &[1.0; 4]).unwrap();
    trainer.step_end(0).unwrap();
    let mut row = [0.0; 4];
    table.get(&[1], &mut row).unwrap();
    assert_eq!(row, [-1.0; 4]);
    plain.get(&[1], &mut row).unwrap();
    assert_eq!(row, [-0.01; 4]);
}

/// Opening an engine reports another version.
fn refused(version: &str) {
    let error = Engine::open().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StructSize);
    assert_eq!(error.status_name(), "FRUGAL_ERR_STRUCT_SIZE");
    assert!(error.message().contains(&format!("is version {version}, ")), "{error}");
    let options = TableOptions::new("t", 100, 4);
    let error = memory_needed(&EngineOptions::new(), &options, 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StructSize);
}
