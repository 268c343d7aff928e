//! With a later library than the one that the crate was built with: newer.c, which is loaded before the real one.

use std::env;
use std::path::Path;
use std::process::Command;

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
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let target = env!("FRUGAL_TARGET");
    let compiler = cc::Build::new()
        .target(target)
        .host(target)
        .opt_level(1)
        .pic(true)
        .cargo_metadata(false)
        .cargo_warnings(false)
        .include(env!("FRUGAL_INCLUDE"))
        .get_compiler();
    let mut command = compiler.to_command();
    command.arg("-shared").arg(NEWER).arg("-o").arg(folder.join("libnewer.so"));
    assert!(command.status().unwrap().success(), "{command:?}");

    let later = format!("{}.{}.0", sys::FRUGAL_VERSION_MAJOR, sys::FRUGAL_VERSION_MINOR + 1);
    for version in [format!("{ours}99"), later] {
        // This test again, in a process where the functions of newer.c come first.
        let output = Command::new(env::current_exe().unwrap())
            .args(["--exact", TEST, "--nocapture"])
            // Not by its whole path, in which a blank would be the end of a name.
            .current_dir(folder)
            .env("LD_PRELOAD", "./libnewer.so")
            .env(VERSION, &version)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        assert!(text.contains("1 passed"), "{text}");
    }
}

/// Structs that have grown: what the crate does not know of is left away.
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

/// Another version is told when an engine is opened.
fn refused(version: &str) {
    let error = Engine::open().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StructSize);
    assert_eq!(error.status_name(), "FRUGAL_ERR_STRUCT_SIZE");
    assert!(error.message().contains(&format!("is version {version}, ")), "{error}");
    let options = TableOptions::new("t", 100, 4);
    let error = memory_needed(&EngineOptions::new(), &options, 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StructSize);
}
