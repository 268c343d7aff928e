//! Lets this package's tests, examples and benchmarks find the library when they are run without cargo, and tells
//! dependents where it is: their build scripts get `DEP_FRUGAL_RS_LIB`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let lib = std::env::var("DEP_FRUGAL_LIB").expect("frugal-sys tells it");
    println!("cargo:lib={lib}");
    for what in ["tests", "examples", "benches"] {
        println!("cargo:rustc-link-arg-{what}=-Wl,-rpath,{lib}");
    }
}
