//! The effect of each call, and the error of each misuse.

use std::time::{Duration, Instant};

use frugal::*;

fn engine_and_table(options: TableOptions) -> (Engine, Table) {
    let engine = Engine::open().unwrap();
    let table = engine.create_table(&options).unwrap();
    (engine, table)
}

fn counted(dim: u32) -> (Engine, Table) {
    let (engine, table) = engine_and_table(TableOptions::new("t", 100, dim).optimizer(Optimizer::sgd(1.0)));
    let keys: Vec<u64> = (0..100).collect();
    let rows: Vec<f32> = (0..100 * dim).map(|i| i as f32).collect();
    table.put(&keys, &rows).unwrap();
    (engine, table)
}

fn trainer(engine: &Engine) -> Trainer {
    engine.create_trainer(&TrainerOptions::new(0)).unwrap()
}

#[track_caller]
fn refused<T: std::fmt::Debug>(kind: ErrorKind, words: &str, result: Result<T>) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.message().contains(words), "{error}");
}

#[track_caller]
fn invalid<T: std::fmt::Debug>(words: &str, result: Result<T>) {
    refused(ErrorKind::InvalidArgument, words, result);
}

#[test]
fn a_step_trains() {
    let (engine, table) = counted(2);
    let mut trainer = trainer(&engine);
    let batch = trainer.prefetch(5, table.op(&[3, 9])).unwrap();
    trainer.step_begin(5).unwrap();
    let mut rows = [0.0; 4];
    trainer.lookup(&batch, &mut rows).unwrap();
    assert_eq!(rows, [6.0, 7.0, 18.0, 19.0]);
    trainer.push_grad(&batch, &[1.0, 2.0, 3.0, 4.0]).unwrap();
    trainer.push_grad(table.op(&[3]), &[10.0, 20.0]).unwrap();
    trainer.step_end(5).unwrap();
    assert_eq!(engine.committed_step().unwrap(), Some(5));
    engine.flush().unwrap();
    table.get(&[3, 9], &mut rows).unwrap();
    assert_eq!(rows, [6.0 - 11.0, 7.0 - 22.0, 15.0, 15.0]);
    assert_eq!(engine.stats().unwrap().steps_committed, 1);
    assert_eq!(engine.stats().unwrap().keys_declared, 2);
    engine.health().unwrap();
    engine.close().unwrap();
}

#[test]
fn pooling_weights_padding_and_subsets() {
    let (engine, table) = counted(1);
    let mut trainer = trainer(&engine);
    let keys = [10, 20, 0, 30, 40];
    let op = table.op(&keys).padding(0);
    let batch = trainer.prefetch_all(0, &[op, table.op(&[7])]).unwrap();
    assert_eq!((batch.parts(), batch.key_count()), (2, 6));
    trainer.step_begin(0).unwrap();

    let offsets = [0, 3, 3, 5];
    let (mut sums, mut means, mut weighted) = ([0.0; 3], [0.0; 3], [0.0; 3]);
    let weights = [1.0, 2.0, 3.0, 0.5, 0.25];
    trainer
        .lookup_all(&mut [
            batch.op(0).sum(&offsets).rows(&mut sums),
            batch.op(0).mean(&offsets).rows(&mut means),
            op.weighted_sum(&offsets, &weights).rows(&mut weighted),
        ])
        .unwrap();
    assert_eq!(sums, [30.0, 0.0, 70.0]);
    assert_eq!(means, [15.0, 0.0, 35.0]);
    assert_eq!(weighted, [50.0, 0.0, 25.0]);

    let mut some = [0.0; 2];
    trainer.lookup(batch.op(0).keys(&[40, 10]), &mut some).unwrap();
    assert_eq!(some, [40.0, 10.0]);

    let mut weight_grads = [0.0; 5];
    let push = op.weighted_sum(&offsets, &weights).grads(&[2.0, 100.0, 4.0]);
    trainer.push_grad_all(&mut [push.weight_grads(&mut weight_grads)]).unwrap();
    assert_eq!(weight_grads, [20.0, 40.0, 0.0, 120.0, 160.0]);
    trainer.step_end(0).unwrap();
    let mut rows = [0.0; 5];
    table.get(&keys, &mut rows).unwrap();
    assert_eq!(rows, [8.0, 16.0, 0.0, 28.0, 39.0]);
}

#[test]
fn strided_rows() {
    let (engine, table) = counted(2);
    let mut trainer = trainer(&engine);
    trainer.step_begin(0).unwrap();
    let mut matrix = [-1.0; 8];
    trainer.lookup(table.op(&[1, 2]), RowsMut::strided(&mut matrix, 5)).unwrap();
    assert_eq!(matrix, [2.0, 3.0, -1.0, -1.0, -1.0, 4.0, 5.0, -1.0]);
    let grads = [1.0, 1.0, f32::NAN, 2.0, 2.0];
    trainer.push_grad(table.op(&[1, 2]), Rows::strided(&grads, 3)).unwrap();
    trainer.step_end(0).unwrap();
    let mut rows = [0.0; 7];
    table.get(&[1, 2], RowsMut::strided(&mut rows, 5)).unwrap();
    assert_eq!(rows, [1.0, 2.0, 0.0, 0.0, 0.0, 2.0, 3.0]);
    table.put(&[1, 2], Rows::strided(&rows[..7], 5)).unwrap();
    engine.read(table.op(&[2, 1]), RowsMut::strided(&mut rows, 3)).unwrap();
    assert_eq!(rows, [2.0, 3.0, 0.0, 1.0, 2.0, 2.0, 3.0]);
}

#[test]
fn committed_rows_in_a_step() {
    let options = TableOptions::new("t", 10, 1).optimizer(Optimizer::adagrad(0.5));
    let (engine, table) = engine_and_table(options);
    let mut trainer = engine.create_trainer(&TrainerOptions::new(0)).unwrap();
    let (mut rows, mut with_state, mut found) = ([9.0; 1], [9.0; 2], [false; 1]);
    for step in 0..2 {
        trainer.step_begin(step).unwrap();
        trainer.push_grad(table.op(&[3]), &[2.0]).unwrap();
        table.get(&[3], &mut rows).unwrap_err();
        table.get_committed(&[3], &mut rows, &mut found).unwrap();
        table.get_committed_with_state(&[3], &mut with_state, &mut found).unwrap();
        assert_eq!((with_state, found), ([rows[0], 4.0 * step as f32], [true]));
        trainer.step_end(step).unwrap();
    }
}

#[test]
fn rows_outside_steps() {
    let options = TableOptions::new("t", 10, 2).hashed().optimizer(Optimizer::adagrad(0.1));
    let (engine, table) = engine_and_table(options);
    assert_eq!((table.dim(), table.dim_with_state()), (2, 4));
    table.put_with_state(&[u64::MAX, 5], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]).unwrap();
    table.put(&[6], &[9.0, 10.0]).unwrap();
    let (mut rows, mut found) = ([-1.0; 12], [false; 3]);
    table.get_with_state(&[5, 77, 6], &mut rows, &mut found).unwrap();
    assert_eq!(found, [true, false, true]);
    assert_eq!(rows, [5.0, 6.0, 7.0, 8.0, -1.0, -1.0, -1.0, -1.0, 9.0, 10.0, 0.0, 0.0]);
    table.get_found(&[77, 6], &mut rows[..4], &mut found[..2]).unwrap();
    assert_eq!(&found[..2], [false, true]);

    assert_eq!(table.count().unwrap(), 3);
    let mut keys = table.keys().unwrap();
    keys.sort_unstable();
    assert_eq!(keys, [5, 6, u64::MAX]);
    let (mut cursor, mut some) = (0, [0; 2]);
    assert_eq!(table.keys_from(&mut cursor, &mut some).unwrap(), 2);
    assert_eq!(table.keys_from(&mut cursor, &mut some).unwrap(), 1);
    assert_eq!(table.keys_from(&mut cursor, &mut some).unwrap(), 0);

    assert_eq!(table.delete(&[5, 77]).unwrap(), 1);
    assert_eq!(table.keys().unwrap().len(), 2);
    let info = engine.find_table("t").unwrap().describe().unwrap();
    assert_eq!((info.rows, info.capacity, info.dim, info.state_floats), (2, 10, 2, 2));
    assert_eq!((info.key_space, info.optimizer), (KeySpace::Hashed, OptimizerKind::Adagrad));
    engine.create_table(&TableOptions::new("ü".repeat(127), 1, 1)).unwrap();
    assert_eq!(engine.table_names().unwrap(), ["t".to_string(), "ü".repeat(127)]);
    table.drop_table().unwrap();
    assert_eq!(engine.table_names().unwrap(), ["ü".repeat(127)]);
    refused(ErrorKind::NotFound, "'t'", engine.find_table("t"));
    refused(ErrorKind::BadHandle, "table", table.count());
}

#[test]
fn keys_of_a_large_table() {
    let (_engine, table) = engine_and_table(TableOptions::new("t", 200_000, 1).lazy(true));
    let mut keys = table.keys().unwrap();
    keys.sort_unstable();
    assert!(keys.iter().copied().eq(0..200_000));
}

#[test]
fn reads() {
    let (engine, table) = engine_and_table(TableOptions::new("t", 10, 1).hashed());
    table.put(&[1, 2], &[10.0, 20.0]).unwrap();
    let (mut rows, mut found) = ([-1.0; 3], [true; 3]);
    let op = table.op(&[2, 3, 1]).rows(&mut rows).found(&mut found);
    engine.read_all(&mut [op], Duration::from_secs(1)).unwrap();
    assert_eq!((rows, found), ([20.0, 0.0, 10.0], [true, false, true]));

    let mut trainer = trainer(&engine);
    trainer.step_begin(0).unwrap();
    trainer.read(table.op(&[1]), &mut rows[..1]).unwrap();
    assert_eq!(rows[0], 10.0);
    let op = table.op(&[2, 3, 1]).rows(&mut rows).found(&mut found);
    refused(ErrorKind::Busy, "", engine.read_all(&mut [op], Timeout::Engine));
    assert_eq!(found, [false; 3], "after an error");
    let op = table.op(&[2, 3, 1]).rows(&mut rows).found(&mut found);
    invalid("a read reports", trainer.lookup_all(&mut [op]));
}

#[test]
fn empty_calls() {
    let (engine, table) = counted(2);
    let mut trainer = trainer(&engine);
    let none = trainer.prefetch_all(0, &[]).unwrap();
    let empty = trainer.prefetch(0, table.op(&[])).unwrap();
    trainer.step_begin(0).unwrap();
    trainer.lookup_all(&mut []).unwrap();
    trainer.push_grad_all(&mut []).unwrap();
    trainer.lookup(&empty, &mut []).unwrap();
    trainer.push_grad(&empty, &[]).unwrap();
    let mut bags = [1.0; 4];
    trainer.lookup(table.op(&[]).sum(&[0, 0, 0]), &mut bags).unwrap();
    assert_eq!(bags, [0.0; 4]);
    invalid("0 parts", trainer.lookup(&none, &mut []));
    trainer.step_end(0).unwrap();
    engine.read_all(&mut [], Timeout::Engine).unwrap();
    table.get(&[], &mut []).unwrap();
    table.put(&[], &[]).unwrap();
    assert_eq!(table.delete(&[]).unwrap(), 0);
}

#[test]
fn wrong_lengths() {
    let (engine, table) = counted(3);
    let mut trainer = trainer(&engine);
    let batch = trainer.prefetch_all(0, &[table.op(&[1, 2]), table.op(&[3])]).unwrap();
    let one = trainer.prefetch(0, table.op(&[1, 2])).unwrap();
    trainer.step_begin(0).unwrap();
    let mut rows = [0.0; 7];

    invalid("rows has 5 elements; 2 rows of 3 have 6", trainer.lookup(table.op(&[1, 2]), &mut rows[..5]));
    invalid("rows has 7 elements", trainer.lookup(table.op(&[1, 2]), &mut rows));
    invalid("2 rows of 3 have 6", trainer.lookup(&one, &mut rows));
    invalid("1 rows of 3", trainer.lookup(batch.op(1), &mut rows));
    invalid("grads has 7", trainer.push_grad(&one, &rows));
    invalid("rows has 7", table.get(&[1, 2], &mut rows));
    invalid("rows has 7", table.put(&[1, 2], &rows));
    invalid("rows has 7", engine.read(table.op(&[1]), &mut rows));

    invalid("stride 4 need 7", trainer.lookup(table.op(&[1, 2]), RowsMut::strided(&mut rows[..6], 4)));
    invalid("stride of at least 3", trainer.lookup(table.op(&[1, 2]), RowsMut::strided(&mut rows, 2)));
    invalid("address space", table.get(&[1, 2], RowsMut::strided(&mut rows, usize::MAX / 2)));
    invalid("stride 46116860", table.get(&[1, 2], RowsMut::strided(&mut rows, usize::MAX / 4)));
    trainer.lookup(table.op(&[1, 2]), RowsMut::strided(&mut rows, 4)).unwrap();

    let op = table.op(&[1, 2]);
    invalid("offsets is empty", trainer.lookup(op.sum(&[]), &mut []));
    invalid("rows has 6", trainer.lookup(op.sum(&[0, 2]), &mut rows[..6]));
    invalid("offsets[0]", trainer.lookup(op.sum(&[1, 2]), &mut rows[..3]));
    invalid("decrease", trainer.lookup(op.sum(&[0, 2, 1, 2]), &mut [0.0; 9]));
    invalid("the last of 2 offsets", trainer.lookup(op.mean(&[0, 1]), &mut rows[..3]));
    invalid("the last of 2 offsets", trainer.lookup(op.mean(&[0, u64::MAX]), &mut rows[..3]));
    invalid("weights has 1", trainer.lookup(op.weighted_sum(&[0, 2], &[1.0]), &mut rows[..3]));
    invalid(
        "weights has 3",
        trainer.lookup((&one).into_op().weighted_sum(&[0, 2], &[1.0; 3]), &mut rows[..3]),
    );
    let mut short = [0.0; 1];
    let grads = [0.0; 3];
    let push = op.weighted_sum(&[0, 2], &[1.0, 1.0]).grads(&grads).weight_grads(&mut short);
    invalid("weight_grads has 1", trainer.push_grad_all(&mut [push]));
    let mut no_weights = [0.0; 2];
    let push = op.sum(&[0, 2]).grads(&grads).weight_grads(&mut no_weights);
    invalid("weight_grads_out needs weights", trainer.push_grad_all(&mut [push]));

    let mut found = [true; 3];
    let read = op.rows(&mut rows[..6]).found(&mut found);
    invalid("found has 3", trainer.read_all(&mut [read], Timeout::Engine));
    assert_eq!(found, [false; 3]);
    invalid("found has 3", table.get_found(&[1, 2], &mut rows[..6], &mut found));
    found = [true; 3];
    refused(ErrorKind::Busy, "", table.get_found(&[1], &mut rows[..3], &mut found[..1]));
    invalid("found has 3", table.get_found(&[1, 2], &mut rows[..6], &mut found));
    assert_eq!(found, [false; 3]);
    invalid("3 elements", table.get_with_state(&[1, 2], &mut rows[..3], &mut found[..2]));

    invalid("the batch has 2 parts", trainer.lookup(&batch, &mut rows));
    invalid("part 2: the batch has 2", trainer.lookup(batch.op(2), &mut rows));
    invalid("takes keys, not a batch", trainer.prefetch(1, &one));
    invalid("takes keys, not a batch", trainer.prefetch_all(1, &[table.op(&[1]), batch.op(0)]));
    invalid("a read takes keys", trainer.read(&one, &mut rows[..6]));
}

trait IntoOp<'a> {
    fn into_op(self) -> Op<'a>;
}

impl<'a> IntoOp<'a> for &'a Batch {
    fn into_op(self) -> Op<'a> {
        self.into()
    }
}

#[test]
fn wrong_values() {
    invalid("world_size", EngineOptions::new().world_size(0).open());
    invalid("lookahead", EngineOptions::new().lookahead(41).open());
    invalid("flush_threads", EngineOptions::new().flush_threads(257).open());
    let engine = Engine::open().unwrap();
    let create = |options: TableOptions| engine.create_table(&options);
    invalid("1..255", create(TableOptions::new("", 1, 1)));
    invalid("1..255", create(TableOptions::new("n".repeat(256), 1, 1)));
    invalid("NUL", create(TableOptions::new("a\0b", 1, 1)));
    invalid("rows is 0", create(TableOptions::new("t", 0, 1)));
    invalid("dim is 0", create(TableOptions::new("t", 1, 0)));
    invalid("finite", create(TableOptions::new("t", 1, 1).init(Init::Constant(f32::NAN))));
    invalid("for dense tables", create(TableOptions::new("t", 1, 1).lazy(true).hashed()));
    invalid("beta", create(TableOptions::new("t", 1, 1).optimizer(Optimizer::adam(0.1).beta1(1.0))));
    invalid("NUL", engine.find_table("a\0b"));
    invalid("rank 1", engine.create_trainer(&TrainerOptions::new(1)));
    invalid("cache_ratio", engine.create_trainer(&TrainerOptions::new(0).cache_ratio(1.5)));
    invalid("device 'tpu'", engine.create_trainer(&TrainerOptions::new(0).device("tpu")));
    invalid("NUL", engine.create_trainer(&TrainerOptions::new(0).device("c\0pu")));

    let table = create(TableOptions::new("t", 10, 1)).unwrap();
    refused(ErrorKind::Exists, "'t'", create(TableOptions::new("t", 10, 1)));
    let mut trainer = trainer(&engine);
    refused(ErrorKind::Exists, "rank 0", engine.create_trainer(&TrainerOptions::new(0)));
    // SAFETY: NULL is the default stream.
    refused(ErrorKind::Unsupported, "stream", unsafe { trainer.set_stream(std::ptr::null_mut()) });

    let mut rows = [0.0];
    refused(ErrorKind::NotInStep, "", trainer.lookup(table.op(&[1]), &mut rows));
    refused(ErrorKind::NotInStep, "", trainer.step_end(0));
    refused(ErrorKind::NotInStep, "", trainer.step_abort());
    refused(ErrorKind::KeyOutOfRange, "10", trainer.prefetch(0, table.op(&[10])));
    refused(ErrorKind::KeyOutOfRange, "", trainer.prefetch(0, table.op(as_keys(&[-1]))));
    trainer.step_begin(0).unwrap();
    refused(ErrorKind::StepOrder, "", trainer.step_begin(0));
    refused(ErrorKind::StepRange, "", trainer.prefetch(0, table.op(&[1])));
    refused(ErrorKind::Nan, "", trainer.push_grad(table.op(&[1]), &[f32::NAN]));
    refused(ErrorKind::Busy, "", table.get(&[1], &mut rows));
    refused(ErrorKind::Busy, "", table.drop_table());
    refused(ErrorKind::StepOrder, "", trainer.step_end(1));
    refused(ErrorKind::Busy, "rank 0", table.set_optimizer(1, &Optimizer::adam(0.1)));
    trainer.push_grad(table.op(&[1]), &[1.0]).unwrap();
    trainer.step_end(0).unwrap();
    refused(ErrorKind::StepRange, "", table.set_optimizer(0, &Optimizer::sgd(0.1)));
    invalid("kind", table.set_optimizer(1, &Optimizer::adam(0.1)));
    let later = create(TableOptions::new("later", 10, 1)).unwrap();
    assert_eq!(later.dim_with_state(), 1);
    later.set_optimizer(1, &Optimizer::adam(0.1)).unwrap();
    assert_eq!(later.dim_with_state(), 3);

    let full = create(TableOptions::new("full", 1, 1).hashed()).unwrap();
    full.put(&[5], &[1.0]).unwrap();
    refused(ErrorKind::TableFull, "key 6", full.put(&[6], &[1.0]));
}

#[test]
fn hyper_parameters_belong_to_steps() {
    let (engine, table) = counted(1);
    let mut trainer = trainer(&engine);
    table.set_optimizer(1, &Optimizer::sgd(0.5).grad_scale(4.0)).unwrap();
    for step in 0..2 {
        trainer.step_begin(step).unwrap();
        trainer.push_grad(table.op(&[10]), &[1.0]).unwrap();
        trainer.step_end(step).unwrap();
    }
    trainer.step_begin(2).unwrap();
    trainer.push_grad(table.op(&[10]), &[1.0]).unwrap();
    trainer.step_end_skip(2).unwrap();
    let mut row = [0.0];
    table.get(&[10], &mut row).unwrap();
    assert_eq!(row, [10.0 - 1.0 - 2.0]);
}

#[test]
fn aborts_and_cancels() {
    let (engine, table) = counted(1);
    let mut trainer = trainer(&engine);
    let batch = trainer.prefetch(3, table.op(&[1])).unwrap();
    trainer.prefetch_cancel(&batch).unwrap();
    refused(ErrorKind::BadHandle, "", trainer.prefetch_cancel(&batch));
    trainer.step_begin(3).unwrap();
    trainer.push_grad(table.op(&[1]), &[1.0]).unwrap();
    trainer.step_abort().unwrap();
    trainer.step_begin(3).unwrap();
    trainer.step_end(3).unwrap();
    let mut row = [0.0];
    table.get(&[1], &mut row).unwrap();
    assert_eq!(row, [1.0]);
}

#[test]
fn a_batch_of_another_engine_is_refused() {
    let (one, one_table) = counted(1);
    let (other, other_table) = counted(2);
    let (mut here, mut there) = (trainer(&one), trainer(&other));
    let batch = there.prefetch(0, other_table.op(&[1, 2])).unwrap();
    here.prefetch(0, one_table.op(&[1])).unwrap();
    here.step_begin(0).unwrap();
    refused(ErrorKind::BadHandle, "", here.lookup(&batch, &mut [0.0; 4]));
    refused(ErrorKind::BadHandle, "", here.lookup(other_table.op(&[1]), &mut [0.0; 2]));
    refused(ErrorKind::BadHandle, "", here.prefetch_cancel(&batch));
    let fill = |_: &mut [f32]| unreachable!();
    invalid("another", here.push_borrowed(&other, one_table.op(&[1]), fill));
}

#[test]
fn borrowed_gradients() {
    let (engine, table) = counted(2);
    let mut trainer = trainer(&engine);
    for step in 0..3 {
        let batch = trainer.prefetch(step, table.op(&[1, 2, 1])).unwrap();
        trainer.step_begin(step).unwrap();
        trainer
            .push_borrowed(&engine, &batch, |grads| {
                assert_eq!((grads.len(), grads.as_ptr() as usize % 64), (6, 0));
                grads.copy_from_slice(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
            })
            .unwrap();
        trainer.push_borrowed(&engine, table.op(&[5, 6]).sum(&[0, 2]), |grads| grads.fill(1.0)).unwrap();
        trainer.step_end(step).unwrap();
    }
    let mut rows = [0.0; 6];
    table.get(&[1, 2, 5], &mut rows).unwrap();
    assert_eq!(rows, [2.0 - 18.0, 3.0 - 24.0, 4.0 - 9.0, 5.0 - 12.0, 10.0 - 3.0, 11.0 - 3.0]);
    refused(ErrorKind::NotInStep, "", trainer.push_borrowed(&engine, table.op(&[1]), |_| unreachable!()));
}

#[test]
fn a_panic_in_fill_leaves_the_step_as_it_was() {
    let (engine, table) = counted(1);
    let mut trainer = trainer(&engine);
    trainer.step_begin(0).unwrap();
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        trainer.push_borrowed(&engine, table.op(&[1]), |_| panic!("in fill, on purpose"))
    }));
    assert!(outcome.is_err());
    trainer.push_grad(table.op(&[1]), &[0.5]).unwrap();
    trainer.step_end(0).unwrap();
    let mut row = [0.0];
    table.get(&[1], &mut row).unwrap();
    assert_eq!(row, [0.5]);
}

#[test]
fn time_outs() {
    let engine = EngineOptions::new().world_size(2).timeout(Duration::from_millis(1)).open().unwrap();
    let mut trainer = trainer(&engine);
    trainer.step_begin(0).unwrap();
    trainer.step_end(0).unwrap();
    refused(ErrorKind::Timeout, "rank", trainer.step_begin(1));
    refused(ErrorKind::Timeout, "rank", trainer.step_begin_within(1, Duration::ZERO));
    // The time-out is rounded up: this waits a little, where 0 would only poll.
    let start = Instant::now();
    refused(ErrorKind::Timeout, "rank", trainer.step_begin_within(1, Duration::from_nanos(1)));
    assert!(start.elapsed() >= Duration::from_millis(1));
    engine.flush_within(Duration::MAX).unwrap();
    engine.flush_within(Timeout::Infinite).unwrap();
    let mut rows: [f32; 0] = [];
    let table = engine.create_table(&TableOptions::new("t", 1, 1));
    let table = table.unwrap();
    let late = trainer.read_all(&mut [table.op(&[]).rows(&mut rows)], Duration::ZERO);
    refused(ErrorKind::Timeout, "", late);
}

#[test]
fn memory_is_told() {
    let table = TableOptions::new("t", 1000, 32).optimizer(Optimizer::adagrad(0.1));
    let memory = memory_needed(&EngineOptions::new(), &table, 0).unwrap();
    assert!(memory.values >= 1000 * 32 * 4 && memory.state >= 1000 * 32 * 4);
    assert_eq!(memory.values + memory.state + memory.index + memory.window + memory.cache, memory.total);
    invalid("dim", memory_needed(&EngineOptions::new(), &TableOptions::new("t", 1, 0), 0));
    let engine = EngineOptions::new().host_bytes(1).open().unwrap();
    refused(ErrorKind::OutOfMemory, "", engine.create_table(&table));
}

#[test]
fn errors_tell_what_they_are() {
    let engine = Engine::open().unwrap();
    let error = engine.find_table("x").unwrap_err();
    assert_eq!((error.status(), error.status_name()), (-17, "FRUGAL_ERR_NOT_FOUND"));
    assert_eq!((error.system_code(), error.device_code()), (0, 0));
    assert_eq!(error.to_string(), format!("FRUGAL_ERR_NOT_FOUND: {}", error.message()));
    let boxed: Box<dyn std::error::Error + Send + Sync> = error.clone().into();
    assert_eq!(boxed.downcast_ref::<Error>(), Some(&error));
    let unknown = check(-1000).unwrap_err();
    assert_eq!(unknown.message(), "", "not that of another call");
    assert_eq!(
        (unknown.kind(), unknown.status(), unknown.status_name()),
        (ErrorKind::Unknown, -1000, "FRUGAL_UNKNOWN")
    );
    // SAFETY: the handle is valid.
    check(unsafe { sys::frugal_health(engine.as_raw()) }).unwrap();
    assert_eq!(version(), env!("CARGO_PKG_VERSION"));
}

#[test]
fn every_status_has_its_kind() {
    use ErrorKind::*;
    let kinds = [
        InvalidArgument,
        BadHandle,
        StructSize,
        OutOfMemory,
        KeyOutOfRange,
        TableFull,
        Exists,
        StepOrder,
        StepRange,
        NotInStep,
        StepAborted,
        Busy,
        Timeout,
        Nan,
        Forked,
        Unsupported,
        NotFound,
        Unhealthy,
        Closed,
        Overflow,
        Internal,
        Device,
        PeerLost,
        NoSpace,
        Io,
        Damaged,
        TooNew,
    ];
    for (i, kind) in kinds.into_iter().enumerate() {
        let error = check(-1 - i as i32).unwrap_err();
        assert_eq!(error.kind(), kind);
        // FRUGAL_ERR_KEY_OUT_OF_RANGE is KeyOutOfRange.
        let name = error.status_name().trim_start_matches("FRUGAL_ERR_").replace('_', "").to_lowercase();
        assert_eq!(format!("{kind:?}").to_lowercase(), name);
    }
}

#[test]
fn options_reach_the_engine() {
    let engine = EngineOptions::new()
        .world_size(2)
        .lookahead(3)
        .flush_threads(0)
        .flush_mode(FlushMode::Deferred)
        .staleness(1)
        .pending_bytes(1 << 20)
        .host_bytes(1 << 30)
        .timeout(Timeout::Infinite)
        .backing(Backing::Shm)
        .seed(9)
        .open()
        .unwrap();
    let same = |options: TableOptions| {
        let table = engine.create_table(&options).unwrap();
        let mut rows = [0.0; 3];
        table.get(&[0, 1, 2], &mut rows).unwrap();
        rows
    };
    let uniform = same(TableOptions::new("a", 3, 1).init(Init::Uniform { low: 2.0, high: 3.0 }));
    assert!(uniform.iter().all(|x| (2.0..3.0).contains(x)) && uniform[0] != uniform[1], "{uniform:?}");
    let truncated = Init::TruncatedNormal { mean: 5.0, deviation: 0.5 };
    let truncated = same(TableOptions::new("b", 3, 1).init(truncated));
    assert!(truncated.iter().all(|x| (4.0..=6.0).contains(x)), "{truncated:?}");
    let normal = same(TableOptions::new("c", 3, 1).init(Init::Normal { mean: 100.0, deviation: 1.0 }));
    assert!(normal.iter().all(|x| (80.0..120.0).contains(x)), "{normal:?}");
    let xavier = same(TableOptions::new("d", 3, 1).init(Init::Xavier { gain: 1.0, fan_in: 5.0 }));
    assert!(xavier.iter().all(|x| x.abs() <= 1.0), "{xavier:?}");
    let mut ranks: Vec<_> = (0..2)
        .map(|r| engine.create_trainer(&TrainerOptions::new(r).cache_bytes(1 << 16)).unwrap())
        .collect();
    assert_eq!((ranks[0].rank(), ranks[1].rank()), (0, 1));
    ranks[0].step_begin(0).unwrap();
    // One step of staleness: this rank may run ahead of the other by one.
    ranks[0].step_end(0).unwrap();
    ranks[0].step_begin(1).unwrap();
    ranks[0].step_end(1).unwrap();
    refused(ErrorKind::Timeout, "", ranks[0].step_begin_within(2, Duration::ZERO));
}

#[test]
fn hyper_parameters_reach_the_table() {
    let momentum = Optimizer::momentum_sgd(0.1, 0.5).dampening(0.25).nesterov(true).nesterov(false);
    assert_eq!(momentum.kind(), OptimizerKind::Momentum);
    let options = TableOptions::new("t", 1, 1).init(Init::Constant(1.0)).optimizer(momentum.lr(1.0));
    let (engine, table) = engine_and_table(options);
    let mut trainer = trainer(&engine);
    for step in 0..2 {
        trainer.step_begin(step).unwrap();
        trainer.push_grad(table.op(&[0]), &[1.0]).unwrap();
        trainer.step_end(step).unwrap();
    }
    let mut row = [0.0];
    table.get(&[0], &mut row).unwrap();
    // The momentum is 0.75, then 0.5 * 0.75 + 0.75.
    assert_eq!(row, [1.0 - 0.75 - 1.125]);
    for optimizer in [
        Optimizer::rowwise_adagrad(0.1).eps(0.5).initial_accumulator(0.1),
        Optimizer::adam(0.1).beta1(0.5).beta2(0.5).weight_decay(0.1),
        Optimizer::rmsprop(0.1).rho(0.5).clip_value(1.0),
        Optimizer::ftrl(0.1).ftrl_lambda1(0.1).ftrl_lambda2(0.1).ftrl_beta(2.0).clip_norm(1.0),
        Optimizer::sgd(0.1).weight_decay_l2(0.1).weight_bound(1.0).mean_ranks(true),
    ] {
        let name = format!("{:?}", optimizer.kind());
        let table = engine.create_table(&TableOptions::new(name, 1, 1).optimizer(optimizer)).unwrap();
        assert_eq!(table.describe().unwrap().optimizer, optimizer.kind());
    }
}
