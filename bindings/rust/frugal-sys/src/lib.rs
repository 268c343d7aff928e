//! The C ABI of Frugal, as `frugal.h` declares it. Programs use the crate `frugal`.
//!
//! bindgen generates these items from the header of the linked library, with the header's comments. The
//! `_init` functions of the structs set the same defaults as the header's `_INIT` macros.
//!
//! The build finds the library in `FRUGAL_DIR` (an installed prefix, or a build folder of CMake), then by
//! pkg-config. If there is none, CMake builds it from the repository. Crates that depend on this one directly
//! get `DEP_FRUGAL_INCLUDE` and `DEP_FRUGAL_LIB` in their build scripts.
#![no_std]
#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals, unreachable_pub)]
#![allow(clippy::all)]
// The comments are those of a C header.
#![allow(rustdoc::all)]

include!(concat!(env!("OUT_DIR"), "/frugal.rs"));

// bindgen does not convert constants with casts. A test compares these with C.

/// The engine's own time-out.
pub const FRUGAL_TIMEOUT_DEFAULT: i64 = -1;
/// Waits for ever.
pub const FRUGAL_TIMEOUT_INFINITE: i64 = -2;
/// Staleness without a bound (ASP).
pub const FRUGAL_STALENESS_ASYNC: u64 = u64::MAX;
/// No step is committed yet.
pub const FRUGAL_NO_STEP: u64 = u64::MAX;
