//! Finds the library, or builds it, and generates the declarations of `frugal.h`.
//!
//! It takes the first of these that exists:
//! 1. `FRUGAL_DIR`: an installed prefix (`include/frugal.h`, `lib/libfrugal.so`) or a build folder of CMake;
//! 2. pkg-config's `frugal`;
//! 3. the repository that this crate is part of, built by CMake into cargo's folder.
//!
//! Build scripts of crates that depend directly on this one get `DEP_FRUGAL_INCLUDE` and `DEP_FRUGAL_LIB`.
//! These are the folders of the header and of the library, for example for an rpath.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Folders of the header and of the library.
struct Found {
    include: PathBuf,
    lib: PathBuf,
}

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=FRUGAL_DIR");
    println!("cargo:rerun-if-env-changed=PKG_CONFIG_PATH");
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap());
    let found = match env::var_os("FRUGAL_DIR") {
        Some(dir) if !dir.is_empty() => in_folder(Path::new(&dir)),
        _ => by_pkg_config().unwrap_or_else(|| built(&out)),
    };
    let real = |folder: PathBuf| fs::canonicalize(&folder).unwrap_or(folder);
    let found = Found { include: real(found.include), lib: real(found.lib) };
    let header = found.include.join("frugal.h");
    println!("cargo:rerun-if-changed={}", header.display());
    println!("cargo:include={}", found.include.display());
    println!("cargo:lib={}", found.lib.display());
    println!("cargo:rustc-env=FRUGAL_INCLUDE={}", found.include.display());
    println!("cargo:rustc-env=FRUGAL_LIB={}", found.lib.display());
    println!("cargo:rustc-env=FRUGAL_TARGET={}", env::var("TARGET").unwrap());

    let near = out.join("link");
    name_library_near(&found.lib, &near);
    println!("cargo:rustc-link-search=native={}", near.display());
    println!("cargo:rustc-link-lib=dylib=frugal");

    bindgen::Builder::default()
        .header(header.to_str().expect("the header's path is not UTF-8"))
        .allowlist_item("(frugal|FRUGAL)_.*")
        .prepend_enum_name(false)
        // The header's comments become this crate's documentation.
        .clang_arg("-fparse-all-comments")
        .use_core()
        .layout_tests(true)
        .rust_target(bindgen::RustTarget::stable(85, 0).unwrap_or_else(|_| unreachable!()))
        .rust_edition(bindgen::RustEdition::Edition2024)
        .formatter(bindgen::Formatter::None)
        .generate()
        .expect("bindgen failed; it needs libclang (Debian: libclang-dev)")
        .write_to_file(out.join("frugal.rs"))
        .expect("the declarations cannot be written");
}

fn in_folder(dir: &Path) -> Found {
    assert!(dir.is_absolute(), "FRUGAL_DIR must be an absolute path, but is {}", dir.display());
    let mut include = dir.join("include");
    if !include.join("frugal.h").is_file() {
        if let Some(source) = source_of_build(dir) {
            include = source.join("include");
        }
    }
    assert!(
        include.join("frugal.h").is_file(),
        "FRUGAL_DIR={} has no include/frugal.h: give an installed prefix or a build folder of CMake",
        dir.display()
    );
    let lib = library_in(dir).unwrap_or_else(|| panic!("FRUGAL_DIR={} has no libfrugal.so", dir.display()));
    Found { include, lib }
}

/// The source folder that CMake noted in its build folder.
fn source_of_build(dir: &Path) -> Option<PathBuf> {
    let cache = fs::read_to_string(dir.join("CMakeCache.txt")).ok()?;
    let line = cache.lines().find_map(|l| l.strip_prefix("CMAKE_HOME_DIRECTORY:INTERNAL="))?;
    Some(PathBuf::from(line))
}

/// The folder of the library in a prefix or a build folder.
fn library_in(dir: &Path) -> Option<PathBuf> {
    let mut folders = vec![dir.to_path_buf(), dir.join("lib"), dir.join("lib64")];
    // Debian's multiarch.
    for entry in fs::read_dir(dir.join("lib")).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().ends_with("-linux-gnu") {
            folders.push(entry.path());
        }
    }
    folders.into_iter().find(|f| f.join("libfrugal.so").is_file())
}

fn by_pkg_config() -> Option<Found> {
    let package =
        pkg_config::Config::new().range_version("0.1".."1").cargo_metadata(false).probe("frugal").ok()?;
    // pkg-config leaves out the compiler's own folders.
    let standard = [PathBuf::from("/usr/include"), PathBuf::from("/usr/local/include")];
    let include = package.include_paths.into_iter().chain(standard);
    let include = include.into_iter().find(|f| f.join("frugal.h").is_file())?;
    let prefixes = [PathBuf::from("/usr"), PathBuf::from("/usr/local")];
    let lib = package.link_paths.into_iter().chain(prefixes).find_map(|f| library_in(&f))?;
    Some(Found { include, lib })
}

fn built(out: &Path) -> Found {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    assert!(
        root.join("include/frugal.h").is_file() && root.join("CMakeLists.txt").is_file(),
        "no libfrugal: pkg-config knows no `frugal`, and this crate is not in its repository. Install the \
         library, or set FRUGAL_DIR to its prefix"
    );
    for part in ["CMakeLists.txt", "cmake", "include", "lib"] {
        println!("cargo:rerun-if-changed={}", root.join(part).display());
    }
    let build = out.join("build");
    let prefix = out.join("prefix");
    let mut configure = Command::new("cmake");
    configure.arg("-S").arg(&root).arg("-B").arg(&build);
    configure.arg("-DCMAKE_BUILD_TYPE=Release");
    configure.arg(format!("-DCMAKE_INSTALL_PREFIX={}", prefix.display()));
    for part in ["TESTS", "EXAMPLES", "BENCH", "TOOLS"] {
        configure.arg(format!("-DFRUGAL_{part}=OFF"));
    }
    run(&mut configure);
    let jobs = env::var("NUM_JOBS").unwrap_or_else(|_| "1".into());
    run(Command::new("cmake").arg("--build").arg(&build).args(["--target", "install", "--parallel", &jobs]));
    in_folder(&prefix)
}

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|e| panic!("{command:?} cannot be started: {e}"));
    assert!(status.success(), "{command:?} failed: {status}");
}

/// Makes links to the library in a folder of cargo's. The programs that cargo runs (tests, examples,
/// doctests) search only such folders at run time.
fn name_library_near(lib: &Path, near: &Path) {
    let _ = fs::remove_dir_all(near);
    fs::create_dir_all(near).expect("cargo's folder cannot be written");
    let entries = fs::read_dir(lib).expect("the library's folder cannot be read");
    for entry in entries.flatten() {
        let name = entry.file_name();
        if name.to_string_lossy().starts_with("libfrugal.so") {
            println!("cargo:rerun-if-changed={}", entry.path().display());
            std::os::unix::fs::symlink(entry.path(), near.join(name)).expect("no symbolic link");
        }
    }
}
