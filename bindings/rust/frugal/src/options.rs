//! Options of engines, tables, trainers and optimizers: builders that begin with the defaults of `frugal.h`.

use std::ffi::CString;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use frugal_sys as sys;

use crate::engine::Engine;
use crate::error::{Error, Result, call, check_version};
use crate::log::{Hook, LogLevel, trampoline};

/// A struct of `frugal.h` that may grow, and the function that sets its defaults.
///
/// # Safety
///
/// All bytes of the struct may be zeros, and `INIT` fills the struct as the loaded library defines it.
unsafe trait Grows: Copy {
    const INIT: unsafe extern "C" fn(*mut Self);

    /// Sets the size that this crate was built with.
    fn set_size(&mut self);
}

macro_rules! grows {
    ($($name:ident by $init:ident $(with $part:ident)?;)+) => {
        $(
            // SAFETY: structs of numbers and of pointers and functions that may be NULL.
            unsafe impl Grows for sys::$name {
                const INIT: unsafe extern "C" fn(*mut Self) = sys::$init;

                fn set_size(&mut self) {
                    self.struct_size = size_of::<Self>();
                    $(self.$part.set_size();)?
                }
            }
        )+
    };
}

grows! {
    frugal_config by frugal_config_init;
    frugal_optimizer by frugal_optimizer_init;
    frugal_table_config by frugal_table_config_init with optimizer;
    frugal_trainer_config by frugal_trainer_config_init;
}

/// The defaults of the loaded library. In a later library the struct may have grown at its end: there is room
/// for that, and the fields that this crate does not know are cut off.
fn defaults<T: Grows>() -> T {
    #[repr(C, align(64))]
    struct Room([u8; 4096]);
    const { assert!(size_of::<T>() * 4 <= size_of::<Room>() && align_of::<T>() <= align_of::<Room>()) };
    let mut room = Room([0; 4096]);
    let start = (&raw mut room).cast::<T>();
    // SAFETY: the room is aligned, and large enough for what the function writes. All of its bytes are set,
    // at least to zero, and it begins with a struct of this crate's size.
    let mut raw = unsafe {
        T::INIT(start);
        start.read()
    };
    raw.set_size();
    raw
}

/// The longest time that a call waits.
///
/// A call whose time-out passes returns [`ErrorKind::Timeout`](crate::ErrorKind::Timeout). It has had no
/// effect and can be made again. A waiting thread holds no lock of Rust's, so long waits need no slices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Timeout {
    /// The engine's time-out: [`EngineOptions::timeout`], 30 minutes unless set.
    #[default]
    Engine,
    /// For ever.
    Infinite,
    /// This long, rounded up to whole milliseconds. Zero polls.
    After(Duration),
}

impl From<Duration> for Timeout {
    fn from(duration: Duration) -> Self {
        Self::After(duration)
    }
}

impl Timeout {
    pub(crate) fn milliseconds(self) -> i64 {
        match self {
            Self::Engine => sys::FRUGAL_TIMEOUT_DEFAULT,
            Self::Infinite => sys::FRUGAL_TIMEOUT_INFINITE,
            // More than the largest number of milliseconds is for ever.
            Self::After(duration) => {
                i64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(sys::FRUGAL_TIMEOUT_INFINITE)
            }
        }
    }
}

/// How updates reach the host rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(i32)]
pub enum FlushMode {
    /// The engine chooses between `AtOnce` and `Deferred` by measured idle time.
    #[default]
    Auto = sys::FRUGAL_FLUSH_AUTO as i32,
    /// All threads, trainers included, apply a step's updates after its end.
    AtOnce = sys::FRUGAL_FLUSH_AT_ONCE as i32,
    /// Priority-based proactive flushing with a two-level queue.
    Deferred = sys::FRUGAL_FLUSH_DEFERRED as i32,
    /// All updates are written at the step's end, before the next step begins.
    WriteThrough = sys::FRUGAL_FLUSH_WRITE_THROUGH as i32,
    /// As `Deferred`, but the queue is a heap with a lock per node: a baseline for measurements.
    TreeHeap = sys::FRUGAL_FLUSH_TREE_HEAP as i32,
}

/// The memory of the rows of tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(i32)]
pub enum Backing {
    /// Anonymous memory with transparent huge pages.
    #[default]
    Private = sys::FRUGAL_BACKING_PRIVATE as i32,
    /// POSIX shared memory, unlinked at once.
    Shm = sys::FRUGAL_BACKING_SHM as i32,
}

/// Options of an engine.
///
/// ```
/// use frugal::EngineOptions;
///
/// # fn main() -> frugal::Result<()> {
/// let engine = EngineOptions::new()
///     .world_size(4)
///     .lookahead(2)
///     .log(|level, text| eprintln!("{level:?}: {text}"))
///     .open()?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct EngineOptions {
    pub(crate) raw: sys::frugal_config,
    pub(crate) hook: Option<Hook>,
    pub(crate) service: Option<PathBuf>,
}

// SAFETY: the raw struct's pointers are NULL until the engine is opened; the closure is Send + Sync.
unsafe impl Send for EngineOptions {}
// SAFETY: as above; there is no interior mutability.
unsafe impl Sync for EngineOptions {}

impl Default for EngineOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl EngineOptions {
    /// All defaults.
    pub fn new() -> Self {
        Self { raw: defaults(), hook: None, service: None }
    }

    /// Number of ranks, 1 to 4096; 1 unless set.
    pub fn world_size(mut self, ranks: u32) -> Self {
        self.raw.world_size = ranks;
        self
    }

    /// Largest number of future steps whose keys may be declared, 0 to 40; 10 unless set.
    pub fn lookahead(mut self, steps: u32) -> Self {
        self.raw.lookahead = steps;
        self
    }

    /// Number of background threads, 0 to 256; with 0 the waiting threads flush. 1 unless set.
    pub fn flush_threads(mut self, threads: u32) -> Self {
        self.raw.flush_threads = threads;
        self
    }

    /// How updates reach the host rows.
    pub fn flush_mode(mut self, mode: FlushMode) -> Self {
        self.raw.flush_mode = mode as i32;
        self
    }

    /// The number of steps that a lookup may lag: 0 (unless set) is synchronous, `u64::MAX` has no bound.
    pub fn staleness(mut self, steps: u64) -> Self {
        self.raw.staleness = steps;
        self
    }

    /// Memory budget in bytes for updates that are not yet in the host rows; 0 writes through. 1 GiB unless
    /// set.
    pub fn pending_bytes(mut self, bytes: u64) -> Self {
        self.raw.pending_bytes = bytes;
        self
    }

    /// Memory limit in bytes for tables; no limit unless set.
    pub fn host_bytes(mut self, bytes: u64) -> Self {
        self.raw.host_bytes = bytes;
        self
    }

    /// The time of [`Timeout::Engine`]; 30 minutes unless set. (The argument [`Timeout::Engine`] changes
    /// nothing.)
    pub fn timeout(mut self, timeout: impl Into<Timeout>) -> Self {
        let timeout = timeout.into();
        if timeout != Timeout::Engine {
            self.raw.timeout_ms = timeout.milliseconds();
        }
        self
    }

    /// The memory of the rows of tables.
    pub fn backing(mut self, backing: Backing) -> Self {
        self.raw.backing = backing as i32;
        self
    }

    /// The seed of all initial values; 0 unless set.
    pub fn seed(mut self, seed: u64) -> Self {
        self.raw.seed = seed;
        self
    }

    /// A closure for log lines. Threads of the engine call it, perhaps several at once. A panic of it is
    /// caught and dropped. Inside it every call of this crate returns
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind), and an engine or a trainer that is dropped stays
    /// open for ever. The closure is freed when the engine has been closed.
    pub fn log(mut self, hook: impl Fn(LogLevel, &str) + Send + Sync + 'static) -> Self {
        self.hook = Some(Arc::new(hook));
        self
    }

    /// The address of a controller ([`Engine::serve`]) to attach to. The other options must equal those of
    /// its engine. Unless set, the engine is in this process.
    pub fn service(mut self, address: impl Into<PathBuf>) -> Self {
        self.service = Some(address.into());
        self
    }

    /// Opens an engine, which starts its threads, or attaches to one. Errors: `InvalidArgument`,
    /// `OutOfMemory`, `StructSize` (the loaded library has another version than the header that this crate
    /// was built with), `Unsupported` (this build cannot attach), `PeerLost` (no controller serves that
    /// address).
    pub fn open(&self) -> Result<Engine> {
        Engine::with_options(self)
    }

    /// The raw options, with the hook of that number.
    pub(crate) fn with_hook(&self, number: Option<usize>) -> sys::frugal_config {
        let mut raw = self.raw;
        if let Some(number) = number {
            raw.log = Some(trampoline);
            raw.log_context = number as *mut _;
        }
        raw
    }
}

impl fmt::Debug for EngineOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let log = if self.hook.is_some() { "a hook" } else { "none" };
        f.debug_struct("EngineOptions")
            .field("config", &self.raw)
            .field("log", &log)
            .field("service", &self.service)
            .finish()
    }
}

/// The kind of an optimizer; `docs/arithmetic.md` has the equations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(i32)]
pub enum OptimizerKind {
    /// No state.
    Sgd = sys::FRUGAL_SGD as i32,
    /// `dim` floats of state; momentum, dampening, nesterov.
    Momentum = sys::FRUGAL_MOMENTUM as i32,
    /// `dim` floats of state.
    Adagrad = sys::FRUGAL_ADAGRAD as i32,
    /// 1 float of state.
    RowwiseAdagrad = sys::FRUGAL_ROWWISE_ADAGRAD as i32,
    /// Lazy Adam, `2 * dim` floats of state; bias correction by step number + 1.
    Adam = sys::FRUGAL_ADAM as i32,
    /// `dim` floats of state.
    RmsProp = sys::FRUGAL_RMSPROP as i32,
    /// `2 * dim` floats of state: z and n.
    Ftrl = sys::FRUGAL_FTRL as i32,
}

impl OptimizerKind {
    pub(crate) fn of(raw: i32) -> Option<Self> {
        [
            Self::Sgd,
            Self::Momentum,
            Self::Adagrad,
            Self::RowwiseAdagrad,
            Self::Adam,
            Self::RmsProp,
            Self::Ftrl,
        ]
        .into_iter()
        .find(|kind| *kind as i32 == raw)
    }
}

/// An optimizer: its kind and hyper-parameters. A table's first update fixes the kind. The hyper-parameters
/// may change for any step that is not committed ([`Table::set_optimizer`](crate::Table::set_optimizer)). A
/// kind ignores the hyper-parameters that it does not use.
///
/// ```
/// use frugal::Optimizer;
///
/// let optimizer = Optimizer::adam(0.001).beta2(0.98).weight_decay(0.01);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Optimizer {
    pub(crate) raw: sys::frugal_optimizer,
}

macro_rules! hyper_parameters {
    ($($(#[$doc:meta])+ $name:ident,)+) => {
        $(
            $(#[$doc])+
            pub fn $name(mut self, value: f32) -> Self {
                self.raw.$name = value;
                self
            }
        )+
    };
}

impl Optimizer {
    /// An optimizer of that kind with the defaults of `frugal.h`.
    pub fn new(kind: OptimizerKind) -> Self {
        let mut raw: sys::frugal_optimizer = defaults();
        raw.kind = kind as i32;
        Self { raw }
    }

    /// Stochastic gradient descent.
    pub fn sgd(lr: f32) -> Self {
        Self::new(OptimizerKind::Sgd).lr(lr)
    }

    /// Stochastic gradient descent with momentum.
    pub fn momentum_sgd(lr: f32, momentum: f32) -> Self {
        Self::new(OptimizerKind::Momentum).lr(lr).momentum(momentum)
    }

    /// Adagrad.
    pub fn adagrad(lr: f32) -> Self {
        Self::new(OptimizerKind::Adagrad).lr(lr)
    }

    /// Adagrad with one accumulator per row.
    pub fn rowwise_adagrad(lr: f32) -> Self {
        Self::new(OptimizerKind::RowwiseAdagrad).lr(lr)
    }

    /// Lazy Adam.
    pub fn adam(lr: f32) -> Self {
        Self::new(OptimizerKind::Adam).lr(lr)
    }

    /// RMSProp.
    pub fn rmsprop(lr: f32) -> Self {
        Self::new(OptimizerKind::RmsProp).lr(lr)
    }

    /// FTRL-proximal.
    pub fn ftrl(lr: f32) -> Self {
        Self::new(OptimizerKind::Ftrl).lr(lr)
    }

    /// The kind.
    pub fn kind(&self) -> OptimizerKind {
        OptimizerKind::of(self.raw.kind).expect("set by new")
    }

    hyper_parameters! {
        /// Learning rate; 0.01 unless set.
        lr,
        /// Adagrad, row-wise Adagrad, Adam, RMSProp: added to the root; 1e-8 unless set.
        eps,
        /// Momentum: mu; 0.9 unless set.
        momentum,
        /// Momentum: dampening; 0 unless set.
        dampening,
        /// Adam; 0.9 unless set.
        beta1,
        /// Adam; 0.999 unless set.
        beta2,
        /// RMSProp: alpha; 0.99 unless set.
        rho,
        /// FTRL: L1; 0 unless set.
        ftrl_lambda1,
        /// FTRL: L2; 0 unless set.
        ftrl_lambda2,
        /// FTRL: beta; 1 unless set.
        ftrl_beta,
        /// Adagrad, row-wise Adagrad, FTRL's n: state of a new row; fixed as the kind is. 0 unless set.
        initial_accumulator,
        /// Adds this times the weight to the gradient; 0 unless set.
        weight_decay_l2,
        /// Decoupled: `w -= lr * weight_decay * w` after the update; 0 unless set.
        weight_decay,
        /// Clips each element of a gradient to `[-c, c]`; 0, off, unless set.
        clip_value,
        /// Clips a row's gradient to an L2 norm of at most this; 0, off, unless set.
        clip_norm,
        /// Clips each weight to `[-b, b]` after the update; 0, off, unless set.
        weight_bound,
        /// Multiplies the summed gradient; 1 unless set.
        grad_scale,
    }

    /// Momentum: whether it is Nesterov's form; false unless set.
    pub fn nesterov(self, on: bool) -> Self {
        self.flag(sys::FRUGAL_OPT_NESTEROV, on)
    }

    /// Whether the sum over ranks is divided by the number of ranks; false unless set.
    pub fn mean_ranks(self, on: bool) -> Self {
        self.flag(sys::FRUGAL_OPT_MEAN_RANKS, on)
    }

    /// Adam: whether the learning rate is corrected for the bias of the moments, by the step number + 1; true
    /// unless set. With false the caller counts steps, and includes both corrections in the learning rate.
    pub fn bias_correction(self, on: bool) -> Self {
        self.flag(sys::FRUGAL_OPT_NO_BIAS_CORRECTION, !on)
    }

    fn flag(mut self, flag: u32, on: bool) -> Self {
        if on {
            self.raw.flags |= flag;
        } else {
            self.raw.flags &= !flag;
        }
        self
    }
}

/// The keys that a table may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(i32)]
pub enum KeySpace {
    /// Ids `0..rows`; every row exists from the start.
    #[default]
    Dense = sys::FRUGAL_DENSE as i32,
    /// Any key. A row is created on its first use in training. There are at most `rows`.
    Hashed = sys::FRUGAL_HASHED as i32,
}

/// Initial values of rows. They depend only on the engine's seed, the table's name, the key and the column.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Init {
    /// Every element has this value.
    Constant(f32),
    /// Uniform in `[low, high)`.
    Uniform {
        /// The least value.
        low: f32,
        /// The upper bound, which is not a value.
        high: f32,
    },
    /// Normal.
    Normal {
        /// Mean.
        mean: f32,
        /// Standard deviation.
        deviation: f32,
    },
    /// Normal, within two standard deviations of the mean.
    TruncatedNormal {
        /// Mean.
        mean: f32,
        /// Standard deviation.
        deviation: f32,
    },
    /// Uniform in `±gain * sqrt(6 / (fan_in + dim))`.
    Xavier {
        /// Factor.
        gain: f32,
        /// Inputs of a unit; 0 means the table's `rows`.
        fan_in: f32,
    },
}

/// The effect of NaNs in gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(i32)]
pub enum NanPolicy {
    /// The push returns [`ErrorKind::Nan`](crate::ErrorKind::Nan) and has no effect.
    #[default]
    Reject = sys::FRUGAL_NAN_REJECT as i32,
    /// A row whose summed gradient has a NaN is not changed in that step.
    Skip = sys::FRUGAL_NAN_SKIP as i32,
    /// The optimizer computes with them. NaNs are stored as one bit pattern.
    Accept = sys::FRUGAL_NAN_ACCEPT as i32,
}

/// Options of a table.
///
/// ```
/// use frugal::{Engine, Init, Optimizer, TableOptions};
///
/// # fn main() -> frugal::Result<()> {
/// let engine = Engine::open()?;
/// let options = TableOptions::new("users", 1000, 16)
///     .hashed()
///     .init(Init::Uniform { low: -0.1, high: 0.1 })
///     .optimizer(Optimizer::adagrad(0.1));
/// let table = engine.create_table(&options)?;
/// assert_eq!(table.dim(), 16);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct TableOptions {
    name: String,
    raw: sys::frugal_table_config,
}

// SAFETY: the raw struct's pointer, the name, is NULL until the table is created.
unsafe impl Send for TableOptions {}
// SAFETY: as above; there is no interior mutability.
unsafe impl Sync for TableOptions {}

impl TableOptions {
    /// A dense table. `name` has 1 to 255 bytes and is unique in the engine. `rows`, 1 to 2^32 - 2, is the
    /// number of ids, or of a hashed table the most rows. `dim`, 1 to 65536, is the number of elements of a
    /// row.
    pub fn new(name: impl Into<String>, rows: u64, dim: u32) -> Self {
        let mut raw: sys::frugal_table_config = defaults();
        raw.rows = rows;
        raw.dim = dim;
        Self { name: name.into(), raw }
    }

    /// The keys that the table may have; ids `0..rows` unless set.
    pub fn key_space(mut self, keys: KeySpace) -> Self {
        self.raw.key_space = keys as i32;
        self
    }

    /// Short for `key_space(KeySpace::Hashed)`.
    pub fn hashed(self) -> Self {
        self.key_space(KeySpace::Hashed)
    }

    /// Initial values; zeros unless set.
    pub fn init(mut self, init: Init) -> Self {
        let (kind, a, b) = match init {
            Init::Constant(value) => (sys::FRUGAL_INIT_CONSTANT, value, 0.0),
            Init::Uniform { low, high } => (sys::FRUGAL_INIT_UNIFORM, low, high),
            Init::Normal { mean, deviation } => (sys::FRUGAL_INIT_NORMAL, mean, deviation),
            Init::TruncatedNormal { mean, deviation } => (sys::FRUGAL_INIT_TRUNCATED_NORMAL, mean, deviation),
            Init::Xavier { gain, fan_in } => (sys::FRUGAL_INIT_XAVIER, gain, fan_in),
        };
        (self.raw.init, self.raw.init_a, self.raw.init_b) = (kind as i32, a, b);
        self
    }

    /// The effect of NaNs in gradients; unless set, the push is refused.
    pub fn nan_policy(mut self, policy: NanPolicy) -> Self {
        self.raw.nan_policy = policy as i32;
        self
    }

    /// For a dense table: whether a row gets memory and initial values on its first use; false unless set.
    pub fn lazy(mut self, on: bool) -> Self {
        if on {
            self.raw.flags |= sys::FRUGAL_TABLE_LAZY;
        } else {
            self.raw.flags &= !sys::FRUGAL_TABLE_LAZY;
        }
        self
    }

    /// The optimizer; SGD with a learning rate of 0.01 unless set.
    pub fn optimizer(mut self, optimizer: Optimizer) -> Self {
        self.raw.optimizer = optimizer.raw;
        self
    }

    /// Passes the raw struct to a call.
    pub(crate) fn with_raw(&self, function: impl FnOnce(&sys::frugal_table_config) -> i32) -> Result<()> {
        let name = c_string("the table's name", &self.name)?;
        let mut raw = self.raw;
        raw.name = name.as_ptr();
        call(|| function(&raw))
    }
}

/// Options of a trainer.
///
/// ```
/// use frugal::{Engine, TrainerOptions};
///
/// # fn main() -> frugal::Result<()> {
/// let engine = Engine::open()?;
/// let trainer = engine.create_trainer(&TrainerOptions::new(0).cache_ratio(0.1))?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct TrainerOptions {
    device: Option<String>,
    raw: sys::frugal_trainer_config,
}

// SAFETY: the raw struct's pointer, the device, is NULL until the trainer is created.
unsafe impl Send for TrainerOptions {}
// SAFETY: as above; there is no interior mutability.
unsafe impl Sync for TrainerOptions {}

impl TrainerOptions {
    /// A rank, 0 to `world_size - 1`, on the CPU, without a cache.
    pub fn new(rank: u32) -> Self {
        let mut raw: sys::frugal_trainer_config = defaults();
        raw.rank = rank;
        Self { device: None, raw }
    }

    /// `"cpu"` (unless set), or `"cuda:N"` in a build with CUDA. On either, slices are host memory, and a
    /// call has finished with them when it returns. (Managed memory of CUDA is an exception: work on it may
    /// continue in the stream.)
    pub fn device(mut self, device: impl Into<String>) -> Self {
        self.device = Some(device.into());
        self
    }

    /// Size in bytes of the private cache, for rows, state and their index, over all tables; 0 unless set.
    pub fn cache_bytes(mut self, bytes: u64) -> Self {
        self.raw.cache_bytes = bytes;
        self
    }

    /// The cache as a share of each table's rows, 0 to 1; the larger of the two counts. 0 unless set.
    pub fn cache_ratio(mut self, ratio: f64) -> Self {
        self.raw.cache_ratio = ratio;
        self
    }

    /// Whether to take the rank over from an unresponsive trainer process; false unless set. It needs
    /// [`EngineOptions::service`].
    pub fn replace(mut self, on: bool) -> Self {
        self.raw.flags = if on { sys::FRUGAL_TRAINER_REPLACE } else { 0 };
        self
    }

    /// The rank that these options are for.
    pub fn rank(&self) -> u32 {
        self.raw.rank
    }

    /// Passes the raw struct to a call.
    pub(crate) fn with_raw(&self, function: impl FnOnce(&sys::frugal_trainer_config) -> i32) -> Result<()> {
        let device = self.device.as_deref().map(|d| c_string("the device's name", d)).transpose()?;
        let mut raw = self.raw;
        raw.device = device.as_ref().map_or(std::ptr::null(), |d| d.as_ptr());
        call(|| function(&raw))
    }
}

/// A string for C.
pub(crate) fn c_string(what: &str, text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::invalid(format!("{what} has a NUL in it: {text:?}")))
}

/// A path for C.
pub(crate) fn c_path(what: &str, path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Error::invalid(format!("{what} has a NUL in it: {path:?}")))
}

/// The most bytes that a configuration takes: see [`memory_needed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Memory {
    /// Host rows.
    pub values: u64,
    /// Optimizer state.
    pub state: u64,
    /// Keys and hash index of a hashed table at its largest; existence bytes of a lazy one.
    pub index: u64,
    /// The flat index of rows, if updates can be deferred.
    pub window: u64,
    /// One trainer's cache, its index included.
    pub cache: u64,
    /// The sum.
    pub total: u64,
}

/// Returns the bytes that a table of an engine would take with all of its rows. It opens and reserves
/// nothing. `cache_rows` is the number of rows that one trainer's cache would hold. Errors:
/// `InvalidArgument`, `StructSize`.
///
/// ```
/// use frugal::{EngineOptions, TableOptions, memory_needed};
///
/// # fn main() -> frugal::Result<()> {
/// let memory = memory_needed(&EngineOptions::new(), &TableOptions::new("users", 1_000_000, 32), 0)?;
/// assert!(memory.values >= 1_000_000 * 32 * 4);
/// # Ok(()) }
/// ```
pub fn memory_needed(engine: &EngineOptions, table: &TableOptions, cache_rows: u64) -> Result<Memory> {
    check_version()?;
    let mut raw = sys::frugal_memory { values: 0, state: 0, index: 0, window: 0, cache: 0, total: 0 };
    // SAFETY: both structs are complete, and the call fills the result.
    table.with_raw(|table| unsafe { sys::frugal_memory_needed(&engine.raw, table, cache_rows, &mut raw) })?;
    let sys::frugal_memory { values, state, index, window, cache, total } = raw;
    Ok(Memory { values, state, index, window, cache, total })
}
