//! For a test that runs itself again, in a process where the functions of a C file replace the library's.

use std::env;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

/// Compiles `source` to the shared library `name`, which `run_again` finds.
pub(crate) fn compile(source: &str, name: &str, arguments: &[&str]) {
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
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut command = compiler.to_command();
    command.arg("-shared").arg(source).arg("-o").arg(library).args(arguments);
    assert!(command.status().unwrap().success(), "{command:?}");
}

/// Runs the test `test` of this program with `name` preloaded and the environment variable set. The test must
/// pass.
pub(crate) fn run_again(test: &str, name: &str, variable: &str, value: impl AsRef<OsStr>) {
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        // LD_PRELOAD gets a name, not the whole path: a blank in the path would end the name.
        .current_dir(env!("CARGO_TARGET_TMPDIR"))
        .env("LD_PRELOAD", format!("./{name}"))
        .env(variable, value)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("1 passed"), "{text}");
}
