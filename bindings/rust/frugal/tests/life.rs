//! Closing, dropping and forgetting in any order; threads; `fork`; panics.

use std::mem::forget;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use frugal::*;

fn open() -> (Engine, Table, Trainer) {
    let engine = Engine::open().unwrap();
    let table = engine.create_table(&TableOptions::new("t", 100, 4)).unwrap();
    let trainer = engine.create_trainer(&TrainerOptions::new(0)).unwrap();
    (engine, table, trainer)
}

#[track_caller]
fn closed<T: std::fmt::Debug>(result: Result<T>) {
    assert_eq!(result.unwrap_err().kind(), ErrorKind::BadHandle);
}

#[test]
fn everything_of_a_closed_engine_is_an_error() {
    let (engine, table, mut trainer) = open();
    let batch = trainer.prefetch(0, table.op(&[1])).unwrap();
    drop(engine);
    closed(table.count());
    closed(table.keys());
    closed(table.describe());
    closed(table.get(&[1], &mut [0.0; 4]));
    closed(table.put(&[1], &[0.0; 4]));
    closed(table.delete(&[1]));
    closed(table.set_optimizer(0, &Optimizer::sgd(0.1)));
    closed(table.drop_table());
    closed(trainer.prefetch(0, table.op(&[1])));
    closed(trainer.prefetch_cancel(&batch));
    closed(trainer.step_begin(0));
    closed(trainer.lookup(&batch, &mut [0.0; 4]));
    closed(trainer.push_grad(&batch, &[0.0; 4]));
    closed(trainer.step_end(0));
    closed(trainer.step_abort());
    closed(trainer.read(table.op(&[1]), &mut [0.0; 4]));
    closed(trainer.close());
}

#[test]
fn a_new_engine_does_not_take_old_handles() {
    let (engine, table, mut trainer) = open();
    let batch = trainer.prefetch(0, table.op(&[1, 2])).unwrap();
    drop(engine);
    let (engine, new_table, mut new_trainer) = open();
    let new_batch = new_trainer.prefetch(0, new_table.op(&[1])).unwrap();
    new_trainer.step_begin(0).unwrap();
    closed(table.count());
    closed(trainer.step_begin(0));
    closed(new_trainer.lookup(&batch, &mut [0.0; 8]));
    closed(new_trainer.lookup(table.op(&[1]), &mut [0.0; 4]));
    closed(new_trainer.prefetch_cancel(&batch));
    closed(trainer.push_borrowed(&engine, new_table.op(&[1]), |_| unreachable!()).map_err(|e| {
        assert_eq!(e.kind(), ErrorKind::InvalidArgument, "another engine's");
        new_table.op(&[1]);
        table.count().unwrap_err()
    }));
    drop(trainer); // its engine is closed
    new_trainer.lookup(&new_batch, &mut [0.0; 4]).unwrap();
    new_trainer.step_end(0).unwrap();
}

#[test]
fn any_order_of_drops() {
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let (engine, table, mut trainer) = open();
        trainer.step_begin(0).unwrap();
        let (mut engine, mut table, mut trainer) = (Some(engine), Some(table), Some(trainer));
        for which in order {
            match which {
                0 => drop(engine.take()),
                1 => drop(table.take()),
                _ => drop(trainer.take()),
            }
        }
    }
}

#[test]
fn forgetting_is_harmless() {
    let (engine, table, mut trainer) = open();
    let mut rows = vec![0.0; 8];
    let keys = vec![1, 2];
    let batch = trainer.prefetch(0, table.op(&keys)).unwrap();
    trainer.step_begin(0).unwrap();
    trainer.lookup(&batch, &mut rows).unwrap();
    let grads = vec![1.0; 8];
    trainer.push_grad(&batch, &grads).unwrap();
    // The slices can be freed while the step continues: the library has no address of them.
    forget((batch, table.op(&keys).rows(&mut rows)));
    drop((keys, rows, grads));
    trainer.step_end(0).unwrap();
    engine.flush().unwrap();
    forget((trainer, table, engine));

    // A log hook of a forgotten engine stays, too.
    let dropped = Arc::new(AtomicBool::new(false));
    let hook = NoteDrop(Arc::clone(&dropped));
    forget(EngineOptions::new().log(move |_, _| hook.note()).open().unwrap());
    assert!(!dropped.load(Ordering::SeqCst));
}

struct NoteDrop(Arc<AtomicBool>);

impl NoteDrop {
    fn note(&self) {}
}

impl Drop for NoteDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn a_log_hook_is_freed_after_the_close() {
    let dropped = Arc::new(AtomicBool::new(false));
    let hook = NoteDrop(Arc::clone(&dropped));
    let options = EngineOptions::new().log(move |_, _| hook.note());
    let (one, other) = (options.open().unwrap(), options.open().unwrap());
    drop(options);
    one.close().unwrap();
    assert!(!dropped.load(Ordering::SeqCst), "the other engine has it");
    drop(other);
    assert!(dropped.load(Ordering::SeqCst));

    // The hook of an engine that failed to open.
    let dropped = Arc::new(AtomicBool::new(false));
    let hook = NoteDrop(Arc::clone(&dropped));
    EngineOptions::new().world_size(0).log(move |_, _| hook.note()).open().unwrap_err();
    assert!(dropped.load(Ordering::SeqCst));
}

#[test]
fn closing_wakes_a_thread_that_waits() {
    let long = Duration::from_secs(120);
    let end = Instant::now() + long;
    loop {
        let engine = EngineOptions::new().world_size(2).timeout(long).open().unwrap();
        let mut trainer = engine.create_trainer(&TrainerOptions::new(0)).unwrap();
        trainer.step_begin(0).unwrap();
        trainer.step_end(0).unwrap();
        let waits = engine.stats().unwrap().gate_waits;
        let waiting = thread::spawn(move || trainer.step_begin(1));
        // gate_waits counts the call when it begins to wait.
        while engine.stats().unwrap().gate_waits == waits && !waiting.is_finished() {
            thread::sleep(Duration::from_millis(1));
        }
        engine.close().unwrap();
        match waiting.join().unwrap().unwrap_err().kind() {
            ErrorKind::Closed => return,
            // The engine was closed before the call used its handle: try again.
            ErrorKind::BadHandle => assert!(Instant::now() < end, "no wait was met in {long:?}"),
            kind => panic!("{kind:?}"),
        }
    }
}

#[test]
fn a_trainer_dropped_by_a_panic_aborts_the_step() {
    let engine = EngineOptions::new().world_size(2).open().unwrap();
    let table = engine.create_table(&TableOptions::new("t", 10, 1)).unwrap();
    let mut stays = engine.create_trainer(&TrainerOptions::new(0)).unwrap();
    let mut leaves = engine.create_trainer(&TrainerOptions::new(1)).unwrap();
    stays.step_begin(0).unwrap();
    stays.push_grad(table.op(&[1]), &[1.0]).unwrap();
    let of_thread = table.clone();
    let outcome = thread::spawn(move || {
        leaves.step_begin(0).unwrap();
        leaves.push_grad(of_thread.op(&[1]), &[1.0]).unwrap();
        panic!("in a step, on purpose");
    })
    .join();
    assert!(outcome.is_err());
    assert_eq!(stays.step_end(0).unwrap_err().kind(), ErrorKind::StepAborted);
    stays.step_begin(0).unwrap();
    stays.step_end(0).unwrap();
    let mut row = [1.0];
    table.get(&[1], &mut row).unwrap();
    assert_eq!(row, [0.0]);
}

#[test]
fn any_number_of_threads_use_engine_and_table() {
    let (engine, table, _) = open();
    thread::scope(|scope| {
        for number in 0..4 {
            let (engine, table) = (&engine, &table);
            scope.spawn(move || {
                for i in 0..50_u64 {
                    let key = (number * 25 + i % 25) % 100;
                    table.put(&[key], &[number as f32; 4]).unwrap();
                    let mut row = [0.0; 4];
                    table.get(&[key], &mut row).unwrap();
                    assert_eq!(row, [number as f32; 4]);
                    engine.read(table.op(&[key]), &mut row).unwrap();
                    assert_eq!(engine.find_table("none").unwrap_err().kind(), ErrorKind::NotFound);
                    assert_eq!(
                        table.get(&[100 + number], &mut row).unwrap_err().kind(),
                        ErrorKind::KeyOutOfRange
                    );
                }
            });
        }
    });
}

#[test]
fn objects_move_between_threads() {
    fn is_send_and_sync<T: Send + Sync + 'static>() {}
    is_send_and_sync::<Engine>();
    is_send_and_sync::<Table>();
    is_send_and_sync::<Trainer>();
    is_send_and_sync::<Batch>();
    is_send_and_sync::<EngineOptions>();
    is_send_and_sync::<TableOptions>();
    is_send_and_sync::<TrainerOptions>();
    is_send_and_sync::<Error>();

    // Two threads make a trainer's calls, one after the other.
    let (engine, table, trainer) = open();
    let (to, from) = mpsc::channel::<Trainer>();
    to.send(trainer).unwrap();
    for step in 0..4 {
        let mut trainer = from.recv().unwrap();
        let (to, table) = (to.clone(), table.clone());
        thread::spawn(move || {
            trainer.step_begin(step).unwrap();
            trainer.push_grad(table.op(&[1]), &[1.0; 4]).unwrap();
            trainer.step_end(step).unwrap();
            to.send(trainer).unwrap();
        })
        .join()
        .unwrap();
    }
    assert_eq!(engine.committed_step().unwrap(), Some(3));
}

unsafe extern "C" {
    fn fork() -> i32;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    fn _exit(status: i32) -> !;
}

/// Runs `check` in a forked child and returns its result.
fn in_child(check: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child has only this thread, and does nothing but the check. Locks that other threads held
    // are released in it: those of the library by the library, those of libc's allocator by libc.
    unsafe {
        let child = fork();
        if child == 0 {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(check));
            _exit(if matches!(outcome, Ok(true)) { 0 } else { 1 });
        }
        assert!(child > 0);
        let mut status = -1;
        assert_eq!(waitpid(child, &mut status, 0), child);
        status == 0
    }
}

#[test]
fn a_forked_child_does_nothing_to_its_parent() {
    let dropped = Arc::new(AtomicBool::new(false));
    let hook = NoteDrop(Arc::clone(&dropped));
    let engine = EngineOptions::new().log(move |_, _| hook.note()).open().unwrap();
    let table = engine.create_table(&TableOptions::new("t", 10, 1).init(Init::Constant(1.0))).unwrap();
    let mut trainer = engine.create_trainer(&TrainerOptions::new(0)).unwrap();
    trainer.step_begin(0).unwrap();
    let mut owned = Some((trainer, engine));
    let good = in_child(|| {
        let (mut trainer, engine) = owned.take().unwrap();
        let forked = |error: Error| error.kind() == ErrorKind::Forked;
        let mut row = [0.0];
        let calls = table.get(&[1], &mut row).is_err_and(forked)
            && trainer.push_grad(table.op(&[1]), &[1.0]).is_err_and(forked)
            && trainer.push_borrowed(&engine, table.op(&[1]), |_| ()).is_err_and(forked)
            && trainer.close().is_err_and(forked)
            && engine.close().is_err_and(forked);
        // The closure belongs to the parent. This process has a copy, which is not dropped.
        calls && !dropped.load(Ordering::SeqCst)
    });
    assert!(good);
    let (mut trainer, engine) = owned.unwrap();
    trainer.push_grad(table.op(&[1]), &[100.0]).unwrap();
    trainer.step_end(0).unwrap();
    let mut row = [0.0];
    table.get(&[1], &mut row).unwrap();
    assert_eq!(row, [0.0]);
    engine.close().unwrap();
    assert!(dropped.load(Ordering::SeqCst));
}

#[test]
fn a_forked_child_can_open_its_own() {
    let (_engine, _table, _trainer) = open();
    let good = in_child(|| {
        let (engine, table, mut trainer) = open();
        trainer.step_begin(0).is_ok()
            && trainer.push_grad(table.op(&[1]), &[1.0; 4]).is_ok()
            && trainer.step_end(0).is_ok()
            && engine.close().is_ok()
    });
    assert!(good);
}
