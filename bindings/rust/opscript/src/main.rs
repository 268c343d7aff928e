//! Replays an op script (docs/bindings.md) with the public crate only, and prints its hashes.
//!     opscript SCRIPT

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::process::ExitCode;
use std::time::Duration;

use frugal::{
    Batch, Engine, EngineOptions, FlushMode, Init, KeySpace, LookupOp, NanPolicy, Op, Optimizer,
    OptimizerKind, PushOp, Table, TableOptions, Timeout, Trainer, TrainerOptions,
};
use serde_json::Value;

/// An error that ends the script: a wrong line, or a call with another status than the script has.
type Broken = String;

/// A call's result, inside the result of parsing its line.
type Called = Result<frugal::Result<()>, Broken>;

// --- Numbers and fields ---

fn big(value: &Value) -> Result<u64, Broken> {
    let text = value.as_str().ok_or_else(|| format!("{value} is no decimal string"))?;
    text.parse().map_err(|e| format!("{text:?}: {e}"))
}

fn number(value: &Value) -> Result<u64, Broken> {
    value.as_u64().ok_or_else(|| format!("{value} is no number"))
}

fn small(value: &Value) -> Result<u32, Broken> {
    u32::try_from(number(value)?).map_err(|e| format!("{value}: {e}"))
}

/// A float is written as the number of its bits.
fn float(value: &Value) -> Result<f32, Broken> {
    Ok(f32::from_bits(small(value)?))
}

fn list<T>(value: &Value, of: impl Fn(&Value) -> Result<T, Broken>) -> Result<Vec<T>, Broken> {
    value.as_array().ok_or_else(|| format!("{value} is no list"))?.iter().map(of).collect()
}

/// A field that may be left out.
fn field<T>(line: &Value, name: &str, of: impl Fn(&Value) -> Result<T, Broken>) -> Result<Option<T>, Broken> {
    line.get(name).map(of).transpose().map_err(|e| format!("\"{name}\": {e}"))
}

fn must<T>(line: &Value, name: &str, of: impl Fn(&Value) -> Result<T, Broken>) -> Result<T, Broken> {
    field(line, name, of)?.ok_or_else(|| format!("\"{name}\" is missing"))
}

/// Selects one of the values by its number in the header; they are in the header's order.
fn one_of<T: Copy>(values: &[T]) -> impl Fn(&Value) -> Result<T, Broken> {
    move |value| {
        let at = number(value)? as usize;
        values.get(at).copied().ok_or_else(|| format!("{value} is not one of {}", values.len()))
    }
}

fn optimizer(line: &Value) -> Result<Optimizer, Broken> {
    use OptimizerKind::*;
    let json = line.get("optimizer").unwrap_or(&Value::Null);
    let kinds = [Sgd, Momentum, Adagrad, RowwiseAdagrad, Adam, RmsProp, Ftrl];
    let mut optimizer = Optimizer::new(field(json, "kind", one_of(&kinds))?.unwrap_or(Sgd));
    type Set = fn(Optimizer, f32) -> Optimizer;
    let setters: [(&str, Set); 17] = [
        ("lr", Optimizer::lr),
        ("eps", Optimizer::eps),
        ("momentum", Optimizer::momentum),
        ("dampening", Optimizer::dampening),
        ("beta1", Optimizer::beta1),
        ("beta2", Optimizer::beta2),
        ("rho", Optimizer::rho),
        ("ftrl_lambda1", Optimizer::ftrl_lambda1),
        ("ftrl_lambda2", Optimizer::ftrl_lambda2),
        ("ftrl_beta", Optimizer::ftrl_beta),
        ("initial_accumulator", Optimizer::initial_accumulator),
        ("weight_decay_l2", Optimizer::weight_decay_l2),
        ("weight_decay", Optimizer::weight_decay),
        ("clip_value", Optimizer::clip_value),
        ("clip_norm", Optimizer::clip_norm),
        ("weight_bound", Optimizer::weight_bound),
        ("grad_scale", Optimizer::grad_scale),
    ];
    for (name, set) in setters {
        if let Some(value) = field(json, name, float)? {
            optimizer = set(optimizer, value);
        }
    }
    let flags = field(json, "flags", number)?.unwrap_or(0);
    if flags > 7 {
        return Err(format!("optimizer flags {flags}"));
    }
    Ok(optimizer.nesterov(flags & 1 != 0).mean_ranks(flags & 2 != 0).bias_correction(flags & 4 == 0))
}

/// The 64-bit FNV-1a hash.
struct Hash(u64);

impl Hash {
    fn new() -> Self {
        Self(14_695_981_039_346_656_037)
    }

    fn add(&mut self, bytes: impl IntoIterator<Item = u8>) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(1_099_511_628_211);
        }
    }

    fn add_floats(&mut self, floats: &[f32]) {
        self.add(floats.iter().flat_map(|x| x.to_bits().to_le_bytes()));
    }

    fn add_flags(&mut self, flags: &[bool]) {
        self.add(flags.iter().map(|f| u8::from(*f)));
    }
}

// --- Ops ---

/// An op as a line gives it.
struct Given {
    table: usize,
    batch: Option<(u64, usize)>,
    keys: Option<Vec<u64>>,
    pooling: u64,
    offsets: Vec<u64>,
    weights: Option<Vec<f32>>,
    padding: Option<u64>,
    grads: Vec<f32>,
}

/// An op of a line, and the memory of the call's outputs.
struct Memory {
    given: Given,
    rows: Vec<f32>,
    found: Vec<bool>,
    weight_grads: Option<Vec<f32>>,
}

impl Given {
    fn op<'a>(&'a self, tables: &'a [Table], batches: &'a HashMap<u64, Batch>) -> Op<'a> {
        let mut op = match self.batch {
            Some((batch, part)) => batches[&batch].op(part),
            None => tables[self.table].op(&[]),
        };
        if let Some(keys) = &self.keys {
            op = op.keys(keys);
        }
        op = match (self.pooling, &self.weights) {
            (0, _) => op,
            (1, None) => op.sum(&self.offsets),
            (1, Some(weights)) => op.weighted_sum(&self.offsets, weights),
            _ => op.mean(&self.offsets),
        };
        match self.padding {
            Some(key) => op.padding(key),
            None => op,
        }
    }
}

// --- The runner ---

struct Runner {
    engine: Option<Engine>,
    tables: Vec<Table>,
    trainers: HashMap<u64, Trainer>,
    batches: HashMap<u64, Batch>,
    /// Number of keys of each part.
    declared: HashMap<u64, Vec<usize>>,
    outputs: Hash,
    hashes: usize,
}

impl Runner {
    fn engine(&self) -> Result<&Engine, Broken> {
        self.engine.as_ref().ok_or_else(|| "no engine is open".to_owned())
    }

    fn table(&self, line: &Value) -> Result<&Table, Broken> {
        let at = must(line, "table", number)?;
        self.tables.get(at as usize).ok_or_else(|| format!("there is no table {at}"))
    }

    fn trainer<'a>(trainers: &'a mut HashMap<u64, Trainer>, line: &Value) -> Result<&'a mut Trainer, Broken> {
        let rank = must(line, "rank", number)?;
        trainers.get_mut(&rank).ok_or_else(|| format!("there is no rank {rank}"))
    }

    fn memories(&self, line: &Value) -> Result<Vec<Memory>, Broken> {
        must(line, "ops", |ops| list(ops, |json| self.memory(json)))
    }

    fn memory(&self, json: &Value) -> Result<Memory, Broken> {
        let table = must(json, "table", number)? as usize;
        let dim = self.tables.get(table).ok_or_else(|| format!("there is no table {table}"))?.dim();
        let keys = field(json, "keys", |v| list(v, big))?;
        let mut count = keys.as_ref().map_or(0, Vec::len);
        let mut batch = None;
        if let Some(number_of_batch) = field(json, "batch", number)? {
            let part = field(json, "part", number)?.unwrap_or(0) as usize;
            let parts = self.declared.get(&number_of_batch);
            let declared = parts.and_then(|parts| parts.get(part));
            let declared = declared.ok_or_else(|| format!("batch {number_of_batch} has no part {part}"))?;
            if keys.is_none() {
                count = *declared;
            }
            batch = Some((number_of_batch, part));
        }
        let pooling = field(json, "pooling", number)?.unwrap_or(0);
        if pooling > 2 {
            return Err(format!("pooling {pooling}"));
        }
        let offsets = field(json, "offsets", |v| list(v, number))?.unwrap_or_default();
        let rows = if pooling == 0 { count } else { offsets.len().saturating_sub(1) };
        let asked = field(json, "weight_grads", |v| Ok(v == &Value::Bool(true)))?.unwrap_or(false);
        let given = Given {
            table,
            batch,
            keys,
            pooling,
            offsets,
            weights: field(json, "weights", |v| list(v, float))?,
            padding: field(json, "padding_key", big)?,
            grads: field(json, "grads", |v| list(v, float))?.unwrap_or_default(),
        };
        Ok(Memory {
            given,
            rows: vec![0.0; rows * dim],
            found: vec![false; count],
            weight_grads: asked.then(|| vec![0.0; count]),
        })
    }

    fn line(&mut self, line: &Value) -> Called {
        let what = must(line, "do", |v| v.as_str().map(str::to_owned).ok_or_else(|| "no string".into()))?;
        match what.as_str() {
            "open" => self.open(line),
            "table" => self.create_table(line),
            "trainer" => self.create_trainer(line),
            "set_optimizer" => {
                let first_step = must(line, "first_step", big)?;
                Ok(self.table(line)?.set_optimizer(first_step, &optimizer(line)?))
            }
            "prefetch" => self.prefetch(line),
            "cancel" => {
                let number = must(line, "batch", number)?;
                let batch = self.batches.get(&number).ok_or_else(|| format!("there is no batch {number}"))?;
                Ok(Self::trainer(&mut self.trainers, line)?.prefetch_cancel(batch))
            }
            "begin" => {
                let timeout = match field(line, "timeout_ms", number)? {
                    Some(milliseconds) => Timeout::After(Duration::from_millis(milliseconds)),
                    None => Timeout::Engine,
                };
                let step = must(line, "step", big)?;
                Ok(Self::trainer(&mut self.trainers, line)?.step_begin_within(step, timeout))
            }
            "lookup" => self.lookup(line),
            "push" => self.push(line),
            "read" => self.read(line),
            "end" => {
                let step = must(line, "step", big)?;
                let flags = field(line, "flags", number)?.unwrap_or(0);
                let trainer = Self::trainer(&mut self.trainers, line)?;
                match flags {
                    0 => Ok(trainer.step_end(step)),
                    1 => Ok(trainer.step_end_skip(step)),
                    _ => Err(format!("flags {flags}")),
                }
            }
            "abort" => Ok(Self::trainer(&mut self.trainers, line)?.step_abort()),
            "get" => self.get(line),
            "put" => {
                let (keys, rows) =
                    (must(line, "keys", |v| list(v, big))?, must(line, "rows", |v| list(v, float))?);
                let table = self.table(line)?;
                match field(line, "flags", number)?.unwrap_or(0) {
                    0 => Ok(table.put(&keys, &rows)),
                    1 => Ok(table.put_with_state(&keys, &rows)),
                    flags => Err(format!("flags {flags}")),
                }
            }
            "delete" => Ok(self.table(line)?.delete(&must(line, "keys", |v| list(v, big))?).map(drop)),
            "flush" => Ok(self.engine()?.flush()),
            "hash" => self.hash(),
            "close_trainer" => {
                let rank = must(line, "rank", number)?;
                let trainer =
                    self.trainers.remove(&rank).ok_or_else(|| format!("there is no rank {rank}"))?;
                Ok(trainer.close())
            }
            "close" => {
                let engine = self.engine.take().ok_or("no engine is open")?;
                Ok(engine.close())
            }
            _ => Err(format!("{what:?} is nothing to do")),
        }
    }

    fn open(&mut self, line: &Value) -> Called {
        use FlushMode::*;
        let mut options = EngineOptions::new();
        if let Some(ranks) = field(line, "world_size", small)? {
            options = options.world_size(ranks);
        }
        if let Some(steps) = field(line, "lookahead", small)? {
            options = options.lookahead(steps);
        }
        if let Some(threads) = field(line, "flush_threads", small)? {
            options = options.flush_threads(threads);
        }
        let modes = [Auto, AtOnce, Deferred, WriteThrough, TreeHeap];
        if let Some(mode) = field(line, "flush_mode", one_of(&modes))? {
            options = options.flush_mode(mode);
        }
        if let Some(steps) = field(line, "staleness", big)? {
            options = options.staleness(steps);
        }
        if let Some(bytes) = field(line, "pending_bytes", big)? {
            options = options.pending_bytes(bytes);
        }
        if let Some(seed) = field(line, "seed", big)? {
            options = options.seed(seed);
        }
        if let Some(address) = std::env::var_os("FRUGAL_SERVICE") {
            options = options.service(address);
        }
        Ok(options.open().map(|engine| self.engine = Some(engine)))
    }

    fn create_table(&mut self, line: &Value) -> Called {
        let name = must(line, "name", |v| v.as_str().map(str::to_owned).ok_or_else(|| "no string".into()))?;
        let mut options = TableOptions::new(name, must(line, "rows", big)?, must(line, "dim", small)?);
        if let Some(keys) = field(line, "key_space", one_of(&[KeySpace::Dense, KeySpace::Hashed]))? {
            options = options.key_space(keys);
        }
        let a = field(line, "init_a", float)?.unwrap_or(0.0);
        let b = field(line, "init_b", float)?.unwrap_or(0.0);
        let inits = [
            Init::Constant(a),
            Init::Uniform { low: a, high: b },
            Init::Normal { mean: a, deviation: b },
            Init::TruncatedNormal { mean: a, deviation: b },
            Init::Xavier { gain: a, fan_in: b },
        ];
        options = options.init(field(line, "init", one_of(&inits))?.unwrap_or(inits[0]));
        let policies = [NanPolicy::Reject, NanPolicy::Skip, NanPolicy::Accept];
        if let Some(policy) = field(line, "nan_policy", one_of(&policies))? {
            options = options.nan_policy(policy);
        }
        let lazy = field(line, "flags", one_of(&[false, true]))?.unwrap_or(false);
        options = options.lazy(lazy).optimizer(optimizer(line)?);
        let created = self.engine()?.create_table(&options);
        let at = must(line, "table", number)? as usize;
        if created.is_ok() && at != self.tables.len() {
            return Err(format!("table {at} is not the next"));
        }
        Ok(created.map(|table| self.tables.push(table)))
    }

    fn create_trainer(&mut self, line: &Value) -> Called {
        let rank = must(line, "rank", small)?;
        let ratio = field(line, "cache_ratio", float)?.unwrap_or(0.0);
        let created = self.engine()?.create_trainer(&TrainerOptions::new(rank).cache_ratio(ratio.into()));
        Ok(created.map(|trainer| drop(self.trainers.insert(rank.into(), trainer))))
    }

    fn prefetch(&mut self, line: &Value) -> Called {
        let memories = self.memories(line)?;
        let counts = memories.iter().map(|m| m.given.keys.as_ref().map_or(0, Vec::len)).collect();
        let ops: Vec<_> = memories.iter().map(|m| m.given.op(&self.tables, &self.batches)).collect();
        let step = must(line, "step", big)?;
        let declared = Self::trainer(&mut self.trainers, line)?.prefetch_all(step, &ops);
        let at = must(line, "batch", number)?;
        Ok(declared.map(|batch| {
            self.batches.insert(at, batch);
            self.declared.insert(at, counts);
        }))
    }

    fn lookup(&mut self, line: &Value) -> Called {
        let mut memories = self.memories(line)?;
        let trainer = Self::trainer(&mut self.trainers, line)?;
        let called = trainer.lookup_all(&mut lookups(&mut memories, &self.tables, &self.batches, false));
        Ok(called.map(|()| memories.iter().for_each(|m| self.outputs.add_floats(&m.rows))))
    }

    fn read(&mut self, line: &Value) -> Called {
        let mut memories = self.memories(line)?;
        let mut ops = lookups(&mut memories, &self.tables, &self.batches, true);
        let called = if line.get("rank").is_some() {
            Self::trainer(&mut self.trainers, line)?.read_all(&mut ops, Timeout::Engine)
        } else {
            self.engine()?.read_all(&mut ops, Timeout::Engine)
        };
        drop(ops);
        Ok(called.map(|()| {
            for memory in &memories {
                self.outputs.add_flags(&memory.found);
                self.outputs.add_floats(&memory.rows);
            }
        }))
    }

    fn push(&mut self, line: &Value) -> Called {
        let mut memories = self.memories(line)?;
        let trainer = Self::trainer(&mut self.trainers, line)?;
        let mut ops: Vec<PushOp<'_>> = Vec::new();
        for Memory { given, weight_grads, .. } in &mut memories {
            let push = given.op(&self.tables, &self.batches).grads(&given.grads);
            ops.push(match weight_grads {
                Some(weight_grads) => push.weight_grads(weight_grads),
                None => push,
            });
        }
        let called = trainer.push_grad_all(&mut ops);
        drop(ops);
        Ok(called.map(|()| {
            for weight_grads in memories.iter().filter_map(|m| m.weight_grads.as_ref()) {
                self.outputs.add_floats(weight_grads);
            }
        }))
    }

    fn get(&mut self, line: &Value) -> Called {
        let keys = must(line, "keys", |v| list(v, big))?;
        let with_state = field(line, "flags", one_of(&[false, true]))?.unwrap_or(false);
        let table = self.table(line)?;
        let width = if with_state { table.dim_with_state() } else { table.dim() };
        let (mut rows, mut found) = (vec![0.0; keys.len() * width], vec![false; keys.len()]);
        let called = if with_state {
            table.get_with_state(&keys, &mut rows, &mut found)
        } else {
            table.get_found(&keys, &mut rows, &mut found)
        };
        Ok(called.map(|()| {
            self.outputs.add_flags(&found);
            for (row, _) in rows.chunks(width).zip(&found).filter(|(_, found)| **found) {
                self.outputs.add_floats(row);
            }
        }))
    }

    fn hash(&mut self) -> Called {
        Ok(self.hash_of_tables().map(|tables| {
            println!("hash {} {:016x} {:016x}", self.hashes, self.outputs.0, tables.0);
            self.hashes += 1;
        }))
    }

    fn hash_of_tables(&self) -> frugal::Result<Hash> {
        let mut hash = Hash::new();
        for table in &self.tables {
            let mut keys = table.keys()?;
            keys.sort_unstable();
            let width = table.dim_with_state();
            let (mut rows, mut found) = (vec![0.0; keys.len() * width], vec![false; keys.len()]);
            table.get_with_state(&keys, &mut rows, &mut found)?;
            hash.add((keys.len() as u64).to_le_bytes());
            for (key, row) in keys.iter().zip(rows.chunks(width)) {
                hash.add(key.to_le_bytes());
                hash.add_floats(row);
            }
        }
        Ok(hash)
    }
}

/// Ops of a lookup; with the `found` flags, ops of a read.
fn lookups<'a>(
    memories: &'a mut [Memory],
    tables: &'a [Table],
    batches: &'a HashMap<u64, Batch>,
    flags: bool,
) -> Vec<LookupOp<'a>> {
    let mut ops = Vec::new();
    for Memory { given, rows, found, .. } in memories {
        let lookup = given.op(tables, batches).rows(rows);
        ops.push(if flags { lookup.found(found) } else { lookup });
    }
    ops
}

fn run(path: &str) -> Result<(), Broken> {
    let script = File::open(path).map_err(|e| format!("{path}: {e}"))?;
    let mut runner = Runner {
        engine: None,
        tables: Vec::new(),
        trainers: HashMap::new(),
        batches: HashMap::new(),
        declared: HashMap::new(),
        outputs: Hash::new(),
        hashes: 0,
    };
    for (n, text) in BufReader::new(script).lines().enumerate() {
        let at = |what: String| format!("line {}: {what}", n + 1);
        let text = text.map_err(|e| at(e.to_string()))?;
        let line: Value = serde_json::from_str(&text).map_err(|e| at(e.to_string()))?;
        let expected = line.get("status").map_or(Some("FRUGAL_OK"), Value::as_str);
        let expected = expected.ok_or_else(|| at("\"status\" is no string".into()))?;
        let called = runner.line(&line).map_err(at)?;
        let (name, told) = match &called {
            Ok(()) => ("FRUGAL_OK", String::new()),
            Err(error) => (error.status_name(), format!(": {}", error.message())),
        };
        if name != expected {
            return Err(at(format!("{} returned {name}, expected {expected}{told}", line["do"])));
        }
        if std::env::var_os("FRUGAL_TURNS").is_some() {
            println!("done"); // lines are flushed one by one
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, path] = arguments.as_slice() else {
        eprintln!("usage: opscript SCRIPT");
        return ExitCode::from(2);
    };
    match run(path) {
        Ok(()) => ExitCode::SUCCESS,
        Err(broken) => {
            eprintln!("{broken}");
            ExitCode::FAILURE
        }
    }
}
