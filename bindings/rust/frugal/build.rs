//! Lets this package's tests, examples and benchmarks find the library when they run without cargo. The build
//! scripts of dependent crates get the library's folder in `DEP_FRUGAL_RS_LIB`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let told = |what: &str| std::env::var(what).expect("frugal-sys sets it");
    let (include, lib) = (told("DEP_FRUGAL_INCLUDE"), told("DEP_FRUGAL_LIB"));
    println!("cargo:lib={lib}");
    for what in ["tests", "examples", "benches"] {
        println!("cargo:rustc-link-arg-{what}=-Wl,-rpath,{lib}");
    }
    // For tests that compile C.
    println!("cargo:rustc-env=FRUGAL_INCLUDE={include}");
    println!("cargo:rustc-env=FRUGAL_LIB={lib}");
    println!("cargo:rustc-env=FRUGAL_TARGET={}", std::env::var("TARGET").expect("cargo sets it"));
}
