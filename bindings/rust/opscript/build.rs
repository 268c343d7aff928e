//! Lets the runner find the library when it runs without cargo.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let lib = std::env::var("DEP_FRUGAL_RS_LIB").expect("frugal sets it");
    println!("cargo:rustc-link-arg-bins=-Wl,-rpath,{lib}");
}
