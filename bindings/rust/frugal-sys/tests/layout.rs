//! The declarations agree with what a C compiler makes of the header. The test generates a C program that
//! prints sizes, offsets, defaults and constants, and compares them.

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write;
use std::fs;
use std::mem::{MaybeUninit, offset_of};
use std::path::PathBuf;
use std::process::Command;

use frugal_sys::*;

/// A struct with the offsets of its fields and, if it has an INIT macro, the bytes that its init function
/// sets.
struct Layout {
    name: &'static str,
    size: usize,
    align: usize,
    /// Name, offset, size.
    fields: Vec<(&'static str, usize, usize)>,
    init: Option<(&'static str, Vec<u8>)>,
}

fn size_of_field<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

/// The bytes that `set` writes, including those between fields.
fn bytes_of<S>(set: unsafe extern "C" fn(*mut S)) -> Vec<u8> {
    let mut value = MaybeUninit::<S>::zeroed();
    // SAFETY: the function fills a struct. Its bytes are read as bytes; all of them were set to zero before.
    unsafe {
        set(value.as_mut_ptr());
        std::slice::from_raw_parts(value.as_ptr().cast::<u8>(), size_of::<S>()).to_vec()
    }
}

macro_rules! layouts {
    ($($name:ident { $($field:ident),+ $(,)? } $(= $macro:ident by $init:ident)?;)+) => {{
        // This does not compile if a field is left out.
        $(const _: fn($name) = |value| { let $name { $($field: _),+ } = value; };)+
        vec![$(Layout {
            name: stringify!($name),
            size: size_of::<$name>(),
            align: align_of::<$name>(),
            fields: vec![$((
                stringify!($field),
                offset_of!($name, $field),
                size_of_field(|value: &$name| &value.$field),
            )),+],
            #[allow(unused_assignments, unused_mut)]
            init: {
                let mut init = None;
                $(init = Some((stringify!($macro), bytes_of($init)));)?
                init
            },
        }),+]
    }};
}

fn layouts() -> Vec<Layout> {
    layouts! {
        frugal_error { status, system_code, device_code, reserved, message };
        frugal_config {
            struct_size, world_size, lookahead, flush_threads, flush_mode, staleness, pending_bytes,
            host_bytes, timeout_ms, backing, flags, seed, log, log_context, service,
        } = FRUGAL_CONFIG_INIT by frugal_config_init;
        frugal_optimizer {
            struct_size, kind, lr, eps, momentum, dampening, beta1, beta2, rho, ftrl_lambda1, ftrl_lambda2,
            ftrl_beta, initial_accumulator, weight_decay_l2, weight_decay, clip_value, clip_norm,
            weight_bound, grad_scale, flags,
        } = FRUGAL_OPTIMIZER_INIT by frugal_optimizer_init;
        frugal_table_config {
            struct_size, name, key_space, dtype, rows, dim, init, init_a, init_b, nan_policy, flags,
            optimizer,
        } = FRUGAL_TABLE_CONFIG_INIT by frugal_table_config_init;
        frugal_table_info {
            struct_size, rows, capacity, value_bytes, state_floats, memory_bytes, dim, key_space, optimizer,
            page_bytes,
        };
        frugal_memory { values, state, index, window, cache, total };
        frugal_trainer_config {
            struct_size, rank, flags, device, cache_bytes, cache_ratio,
        } = FRUGAL_TRAINER_CONFIG_INIT by frugal_trainer_config_init;
        frugal_op {
            struct_size, table, batch, part, pooling, keys, count, offsets, bags, weights, weight_grads_out,
            rows_out, grads, row_stride, found_out, padding_key, flags, reserved,
        } = FRUGAL_OP_INIT by frugal_op_init;
        frugal_stats {
            struct_size, steps_committed, steps_aborted, keys_declared, keys_looked_up, keys_undeclared,
            keys_pushed, rows_created, rows_updated, rows_deferred, gate_waits, gate_wait_ns, gate_in_flight,
            lookup_waits, priority_rises, priority_falls, enqueued, dequeued, back_pressure, ranks_apart,
            stale_reads, cache_hits, cache_misses, cache_admitted, cache_evicted, cache_evicted_dirty,
            pending_bytes, pending_bytes_peak, pending_rows, active_rows, modes_at_once, modes_deferred,
            lookup_ns, push_ns, step_begin_ns, step_end_ns, prefetch_ns, entry_ns, apply_ns, cache_refreshes,
            cache_planned, checkpoints, checkpoints_failed, checkpoint_rows, checkpoint_bytes,
            checkpoint_copies, checkpoint_waits,
        };
        frugal_folder_config {
            struct_size, keep, flags, every_steps, every_ms,
        } = FRUGAL_FOLDER_CONFIG_INIT by frugal_folder_config_init;
        frugal_checkpoint_config {
            struct_size, step, name, blob, blob_size, blob_rank, flags,
        } = FRUGAL_CHECKPOINT_CONFIG_INIT by frugal_checkpoint_config_init;
        frugal_checkpoint_info {
            struct_size, number, step, created, bytes, tables, world_size, blobs, name,
        };
        frugal_restore_config {
            struct_size, folder, number, name, tables, table_count,
        } = FRUGAL_RESTORE_CONFIG_INIT by frugal_restore_config_init;
    }
}

macro_rules! constants {
    ($($name:ident),+ $(,)?) => { vec![$((stringify!($name), $name as i128)),+] };
}

fn constants() -> Vec<(&'static str, i128)> {
    constants![
        FRUGAL_VERSION_MAJOR,
        FRUGAL_VERSION_MINOR,
        FRUGAL_VERSION_PATCH,
        FRUGAL_TIMEOUT_DEFAULT,
        FRUGAL_TIMEOUT_INFINITE,
        FRUGAL_STALENESS_ASYNC,
        FRUGAL_NO_STEP,
        FRUGAL_MAX_LOOKAHEAD,
        FRUGAL_OK,
        FRUGAL_ERR_INVALID_ARGUMENT,
        FRUGAL_ERR_DEVICE,
        FRUGAL_ERR_TOO_NEW,
        FRUGAL_FLUSH_TREE_HEAP,
        FRUGAL_BACKING_SHM,
        FRUGAL_FTRL,
        FRUGAL_OPT_NESTEROV,
        FRUGAL_OPT_MEAN_RANKS,
        FRUGAL_OPT_NO_BIAS_CORRECTION,
        FRUGAL_OPT_NEW_STATE,
        FRUGAL_HASHED,
        FRUGAL_F32,
        FRUGAL_INIT_XAVIER,
        FRUGAL_NAN_ACCEPT,
        FRUGAL_TABLE_LAZY,
        FRUGAL_WITH_STATE,
        FRUGAL_COMMITTED,
        FRUGAL_TRAINER_REPLACE,
        FRUGAL_POOL_MEAN,
        FRUGAL_OP_PADDING,
        FRUGAL_STEP_SKIP,
    ]
}

/// The program: a line for each struct, for each field, and for each constant.
fn program() -> String {
    let mut c = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include <frugal.h>\n\
         #define ALIGN(type) offsetof(struct { char c; type value; }, value)\n\
         static void bytes(const void *from, size_t n) {\n\
         for (size_t i = 0; i < n; ++i) printf(\"%02x\", ((const unsigned char *)from)[i]);\n}\n\
         int main(void) {\n",
    );
    for Layout { name, fields, init, .. } in layouts() {
        writeln!(c, "printf(\"{name} %zu %zu\\n\", sizeof({name}), ALIGN({name}));").unwrap();
        if let Some((macro_name, _)) = init {
            // Static: bytes between fields are zeros.
            writeln!(c, "static const {name} {name}_value = {macro_name};").unwrap();
        }
        for (field, ..) in fields {
            let place = format!("offsetof({name}, {field}), sizeof((({name} *)0)->{field})");
            writeln!(c, "printf(\"{name}.{field} %zu %zu \", {place});").unwrap();
            if init_is_compared(name, field) && has_init(name) {
                writeln!(c, "bytes(&{name}_value.{field}, sizeof({name}_value.{field}));").unwrap();
            }
            writeln!(c, "printf(\"\\n\");").unwrap();
        }
    }
    for (name, _) in constants() {
        // The value both as a long long and as an unsigned long long.
        writeln!(
            c,
            "printf(\"{name} %s%llu\\n\", ({name}) < 0 ? \"-\" : \"\", ({name}) < 0 ? \
             0ull - (unsigned long long)({name}) : (unsigned long long)({name}));"
        )
        .unwrap();
    }
    c.push_str("return 0;\n}\n");
    c
}

fn has_init(name: &str) -> bool {
    layouts().iter().any(|l| l.name == name && l.init.is_some())
}

/// A nested struct has bytes between its fields that C leaves undefined, so its fields are compared
/// separately.
fn init_is_compared(name: &str, field: &str) -> bool {
    (name, field) != ("frugal_table_config", "optimizer")
}

/// The lines of the C program: the first word of each, and the rest.
fn by_c() -> BTreeMap<String, String> {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let (source, binary) = (folder.join("layout.c"), folder.join("layout"));
    fs::write(&source, program()).unwrap();
    let target = env!("FRUGAL_TARGET");
    let compiler = cc::Build::new()
        .target(target)
        .host(target)
        .opt_level(0)
        .cargo_metadata(false)
        .cargo_warnings(false)
        .warnings(false)
        .std("c11")
        .include(env!("FRUGAL_INCLUDE"))
        .get_compiler();
    let status = compiler.to_command().arg(&source).arg("-o").arg(&binary).status().unwrap();
    assert!(status.success(), "{} does not compile", source.display());
    let output = Command::new(&binary).output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines()
        .map(|line| {
            let (name, rest) = line.split_once(' ').unwrap();
            (name.to_owned(), rest.trim().to_owned())
        })
        .collect()
}

#[test]
fn sizes_offsets_defaults_and_constants_are_those_of_c() {
    let mut c = by_c();
    let mut compare = |name: &str, rust: String| {
        let c = c.remove(name).unwrap_or_else(|| panic!("C has printed no {name}"));
        assert_eq!(rust, c, "{name}");
    };
    for Layout { name, size, align, fields, init } in layouts() {
        compare(name, format!("{size} {align}"));
        for (field, offset, size) in fields {
            let mut line = format!("{offset} {size} ");
            if let Some((_, bytes)) = init.as_ref().filter(|_| init_is_compared(name, field)) {
                for byte in &bytes[offset..offset + size] {
                    write!(line, "{byte:02x}").unwrap();
                }
            }
            compare(&format!("{name}.{field}"), line.trim().to_owned());
        }
    }
    for (name, value) in constants() {
        compare(name, value.to_string());
    }
    assert!(c.is_empty(), "not compared: {c:?}");
}

#[test]
fn the_optimizer_in_a_table_config_has_its_own_defaults() {
    let optimizer = bytes_of(frugal_optimizer_init);
    let table = bytes_of(frugal_table_config_init);
    let start = offset_of!(frugal_table_config, optimizer);
    // Up to the end of the last field.
    let end = offset_of!(frugal_optimizer, flags) + size_of::<u32>();
    assert_eq!(table[start..start + end], optimizer[..end]);
}

#[test]
fn all_structs_are_compared() {
    let declarations = fs::read_to_string(concat!(env!("OUT_DIR"), "/frugal.rs")).unwrap();
    let compared: Vec<_> = layouts().iter().map(|l| l.name).collect();
    for part in declarations.split("pub struct ").skip(1) {
        let name = part.split([' ', '{']).next().unwrap();
        let opaque = ["frugal_engine", "frugal_table", "frugal_trainer", "frugal_batch"];
        assert!(compared.contains(&name) || opaque.contains(&name), "{name} is not compared");
    }
}
