//! The ABI gets the addresses of the caller's slices, in one call for each call. The spy library, which all
//! bindings share, is loaded before the real one and notes them.

mod preload;

use std::env;
use std::ffi::{CStr, c_char, c_void};
use std::path::Path;

use frugal::*;

const TEST: &str = "the_addresses_of_slices_reach_the_library";
const SPY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../spy/spy.c");

#[test]
fn the_addresses_of_slices_reach_the_library() {
    if env::var_os("FRUGAL_SPY_REAL").is_some() {
        return spied();
    }
    preload::compile(SPY, "libspy.so", &["-ldl"]);
    let real = Path::new(env!("FRUGAL_LIB")).join("libfrugal.so");
    preload::run_again(TEST, "libspy.so", "FRUGAL_SPY_REAL", real);
}

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// `spy_note` of spy.c.
#[repr(C)]
struct Note {
    function: [c_char; 32],
    op_count: u64,
    ops: [sys::frugal_op; 16],
}

struct Spy {
    last: unsafe extern "C" fn(*mut Note),
    calls: unsafe extern "C" fn() -> u64,
    seen: u64,
}

impl Spy {
    fn new() -> Self {
        // SAFETY: NULL is RTLD_DEFAULT; the functions are those of spy.c, whose library stays loaded.
        unsafe {
            let last = dlsym(std::ptr::null_mut(), c"spy_last".as_ptr());
            let calls = dlsym(std::ptr::null_mut(), c"spy_calls".as_ptr());
            assert!(!last.is_null() && !calls.is_null(), "the spy was not loaded");
            Self {
                last: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut Note)>(last),
                calls: std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> u64>(calls),
                seen: 0,
            }
        }
    }

    /// Starts to count calls.
    fn start(&mut self) {
        // SAFETY: the function has no preconditions.
        self.seen = unsafe { (self.calls)() };
    }

    /// Returns the ops of the one call since `start`.
    fn ops(&mut self, function: &str) -> Vec<sys::frugal_op> {
        let before = self.seen;
        self.start();
        assert_eq!(self.seen - before, 1, "calls for one {function}");
        let mut note = std::mem::MaybeUninit::<Note>::zeroed();
        // SAFETY: the function fills the note; all of its bytes may be zeros.
        let note = unsafe {
            (self.last)(note.as_mut_ptr());
            note.assume_init()
        };
        // SAFETY: the name ends in NUL.
        let name = unsafe { CStr::from_ptr(note.function.as_ptr()) };
        assert_eq!(name.to_str().unwrap(), format!("frugal_{function}"));
        note.ops[..note.op_count as usize].to_vec()
    }

    fn op(&mut self, function: &str) -> sys::frugal_op {
        let ops = self.ops(function);
        assert_eq!(ops.len(), 1);
        ops[0]
    }
}

fn spied() {
    let engine = Engine::open().unwrap();
    let table = engine.create_table(&TableOptions::new("t", 100, 4)).unwrap();
    let mut trainer = engine.create_trainer(&TrainerOptions::new(0)).unwrap();
    let mut spy = Spy::new();

    // Subslices of larger slices, so that no other object has these addresses.
    let all_keys: Vec<u64> = (0..50).collect();
    let keys = &all_keys[7..13];
    let offsets = &[9, 0, 2, 6][1..];
    let weights = &[0.5_f32; 8][2..];
    let grads = [1.0_f32; 40];
    let mut rows = vec![0.0_f32; 60];

    spy.start();
    let batch = trainer.prefetch(0, table.op(keys)).unwrap();
    let op = spy.op("prefetch");
    assert_eq!((op.keys, op.count, op.table), (keys.as_ptr(), 6, table.as_raw()));

    trainer.step_begin(0).unwrap();
    spy.start();
    trainer.lookup(table.op(keys), &mut rows[4..28]).unwrap();
    let op = spy.op("lookup");
    assert_eq!((op.keys, op.rows_out.cast_const(), op.row_stride), (keys.as_ptr(), rows[4..].as_ptr(), 0));

    trainer.lookup(&batch, RowsMut::strided(&mut rows[3..], 9)).unwrap();
    let op = spy.op("lookup");
    assert_eq!((op.keys, op.batch, op.part), (std::ptr::null(), batch.as_raw().cast_const(), 0));
    assert_eq!((op.rows_out.cast_const(), op.row_stride), (rows[3..].as_ptr(), 36));

    let (first, second) = rows.split_at_mut(24);
    let second = &mut second[1..9];
    let addresses = [first.as_ptr(), second.as_ptr()];
    let pooled = table.op(keys).weighted_sum(offsets, weights);
    trainer.lookup_all(&mut [batch.op(0).rows(&mut *first), pooled.rows(&mut *second)]).unwrap();
    let ops = spy.ops("lookup");
    assert_eq!([ops[0].rows_out.cast_const(), ops[1].rows_out.cast_const()], addresses);
    assert_eq!((ops[1].offsets, ops[1].bags, ops[1].weights), (offsets.as_ptr(), 2, weights.as_ptr()));

    trainer.push_grad(&batch, &grads[3..27]).unwrap();
    assert_eq!(spy.op("push_grad").grads, grads[3..].as_ptr());
    let mut weight_grads = [0.0; 8];
    let out = &mut weight_grads[1..7];
    let address = out.as_ptr();
    let push = pooled.grads(Rows::strided(&grads[5..], 6)).weight_grads(out);
    trainer.push_grad_all(&mut [push]).unwrap();
    let op = spy.op("push_grad");
    assert_eq!((op.grads, op.row_stride, op.weights), (grads[5..].as_ptr(), 24, weights.as_ptr()));
    assert_eq!(op.weight_grads_out.cast_const(), address);

    let mut lent = std::ptr::null();
    trainer.push_borrowed(&engine, table.op(keys), |grads| lent = grads.as_ptr()).unwrap();
    spy.seen += 1; // frugal_borrow
    assert_eq!(spy.op("push_grad").grads, lent);
    trainer.step_end(0).unwrap();

    let mut found = [false; 9];
    spy.start();
    let read = table.op(keys).rows(&mut rows[2..26]).found(&mut found[2..8]);
    engine.read_all(&mut [read], Timeout::Engine).unwrap();
    let op = spy.op("read");
    assert_eq!((op.keys, op.rows_out.cast_const()), (keys.as_ptr(), rows[2..].as_ptr()));
    assert_eq!(op.found_out.cast_const().cast(), found[2..].as_ptr());

    table.get_found(keys, RowsMut::strided(&mut rows[2..], 5), &mut found[1..7]).unwrap();
    let op = spy.op("get");
    assert_eq!((op.keys, op.rows_out.cast_const(), op.row_stride), (keys.as_ptr(), rows[2..].as_ptr(), 20));
    assert_eq!(op.found_out.cast_const().cast(), found[1..].as_ptr());
    table.put(keys, &grads[1..25]).unwrap();
    let op = spy.op("put");
    assert_eq!((op.keys, op.grads), (keys.as_ptr(), grads[1..].as_ptr()));
    table.delete(keys).unwrap();
    assert_eq!(spy.op("delete").keys, keys.as_ptr());
    let mut some = [0; 5];
    table.keys_from(&mut 0, &mut some[1..]).unwrap();
    assert_eq!(spy.op("table_keys").keys, some[1..].as_ptr());

    let ids = [3_i64, -4];
    assert_eq!(as_keys(&ids).as_ptr(), ids.as_ptr().cast());
    assert_eq!(as_keys(&ids), [3, u64::MAX - 3]);
}
