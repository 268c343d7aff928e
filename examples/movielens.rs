//! Biased matrix factorization: rating = mean + user bias + item bias + user row . item row.
//!     movielens [FILE]    lines of FILE: user TAB item TAB rating TAB anything, as in MovieLens' u.data
//! Without a file it makes ratings from planted rows and noise, so that the best possible error is
//! known. README.md says exactly what is computed; the other languages print the same numbers.

use std::error::Error;
use std::{env, fs};

use frugal::{Batch, Engine, Init, Op, Optimizer, Table, TableOptions, Timeout, TrainerOptions};

const DIM: usize = 4;
const BATCH: usize = 256;
const EPOCHS: usize = 10;
const AHEAD: usize = 4;
const TABLES: usize = 4; // users, items, user biases, item biases

#[derive(Clone, Copy)]
struct Rating {
    user: u64,
    item: u64,
    value: f32,
    noise: f64, // planted: what no model can know
}

/// splitmix64
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Nearly normal, with mean 0 and deviation 1: exact, so that every language has the same bits.
    fn normal(&mut self) -> f64 {
        (0..12)
            .map(|_| (self.next() >> 40) as f64 / 16_777_216.0)
            .sum::<f64>()
            - 6.0
    }
}

fn plant() -> Vec<Rating> {
    const USERS: usize = 400;
    const ITEMS: usize = 300;
    let mut random = Random(1);
    let mut normals = |n: usize, deviation: f64| -> Vec<f64> {
        (0..n).map(|_| deviation * random.normal()).collect()
    };
    let (user_bias, item_bias) = (normals(USERS, 0.4), normals(ITEMS, 0.4));
    let (users, items) = (normals(USERS * DIM, 0.6), normals(ITEMS * DIM, 0.6));
    let rating = |_| {
        let (user, item) = (random.next() % USERS as u64, random.next() % ITEMS as u64);
        let (u, i) = (user as usize, item as usize);
        let noise = 0.3 * random.normal();
        let mut value = 3.5 + user_bias[u] + item_bias[i];
        for c in 0..DIM {
            value += users[u * DIM + c] * items[i * DIM + c];
        }
        Rating {
            user,
            item,
            value: (value + noise) as f32,
            noise,
        }
    };
    (0..50_000).map(rating).collect()
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

fn is_decimal(text: &str) -> bool {
    let (number, exponent) = text.split_once('e').unwrap_or((text, "0"));
    let [number, exponent] = [number, exponent].map(|t| t.strip_prefix(['+', '-']).unwrap_or(t));
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    [whole, fraction, exponent].into_iter().all(is_digits)
}

fn parse<'a>(mut words: impl Iterator<Item = &'a str>) -> Option<Rating> {
    let mut key = || words.next().filter(|w| is_digits(w))?.parse().ok();
    let (user, item) = (key()?, key()?);
    let value = words.next().filter(|w| is_decimal(w))?;
    let value = value.parse::<f64>().ok()? as f32;
    value.is_finite().then_some(Rating {
        user,
        item,
        value,
        noise: 0.0,
    })
}

fn load(path: &str) -> Result<Vec<Rating>, Box<dyn Error>> {
    let bytes = fs::read(path).map_err(|e| format!("{path}: {e}"))?;
    let mut ratings = Vec::new();
    for (n, line) in (1..).zip(String::from_utf8_lossy(&bytes).split('\n')) {
        let blank = [' ', '\t', '\r'];
        let mut words = line.split(blank).filter(|w| !w.is_empty()).peekable();
        if words.peek().is_some() {
            let wrong = || format!("{path}: line {n} is not of the form user, item, rating");
            ratings.push(parse(words).ok_or_else(wrong)?);
        }
    }
    if ratings.len() < 10 {
        return Err(format!("{path}: {} ratings, at least 10 are needed", ratings.len()).into());
    }
    Ok(ratings)
}

/// Rows of the four tables, or their gradients, for a batch.
type Buffers = [Vec<f32>; TABLES];

fn width(table: usize) -> usize {
    if table < 2 { DIM } else { 1 }
}

/// Ops on the users and items of some ratings.
fn ops<'a>(tables: &'a [Table; TABLES], users: &'a [u64], items: &'a [u64]) -> [Op<'a>; TABLES] {
    [0, 1, 2, 3].map(|t| tables[t].op(if t % 2 == 0 { users } else { items }))
}

fn keys(ratings: &[Rating]) -> (Vec<u64>, Vec<u64>) {
    ratings.iter().map(|r| (r.user, r.item)).unzip()
}

/// Sets `errors` from `rows`, and returns the sum of their squares, added to `squares`.
fn compare(
    mean: f32,
    ratings: &[Rating],
    rows: &Buffers,
    errors: &mut [f32],
    mut squares: f64,
) -> f64 {
    for (k, rating) in ratings.iter().enumerate() {
        let mut guess = mean + rows[2][k] + rows[3][k];
        for c in 0..DIM {
            guess += rows[0][k * DIM + c] * rows[1][k * DIM + c];
        }
        errors[k] = rating.value - guess;
        squares += f64::from(errors[k]) * f64::from(errors[k]);
    }
    squares
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = env::args().nth(1);
    let ratings = path.as_deref().map_or_else(|| Ok(plant()), load)?;
    let (mut train, mut test) = (Vec::new(), Vec::new()); // every tenth rating is for the test
    for (n, rating) in ratings.into_iter().enumerate() {
        if n % 10 == 9 { &mut test } else { &mut train }.push(rating);
    }
    let mean = (train.iter().map(|r| f64::from(r.value)).sum::<f64>() / train.len() as f64) as f32;
    println!(
        "{} ratings to train, {} to test, mean {mean:.4}",
        train.len(),
        test.len()
    );

    let engine = Engine::open()?;
    let mut tables = Vec::new();
    for (t, name) in ["users", "items", "user biases", "item biases"]
        .into_iter()
        .enumerate()
    {
        let normal = Init::Normal {
            mean: 0.0,
            deviation: 0.1,
        };
        let options = TableOptions::new(name, train.len() as u64, width(t) as u32)
            .hashed() // any id will do; rows come with their first use
            .init(if t < 2 { normal } else { Init::Constant(0.0) })
            .optimizer(Optimizer::adagrad(0.1).weight_decay_l2(0.02));
        tables.push(engine.create_table(&options)?);
    }
    let tables: [Table; TABLES] = tables.try_into().expect("four");
    let mut trainer = engine.create_trainer(&TrainerOptions::new(0))?;

    let mut random = Random(2);
    let mut step = 0;
    let mut rows: Buffers = [0, 1, 2, 3].map(|t| vec![0.0; BATCH * width(t)]);
    let mut grads = rows.clone();
    let mut errors = [0.0; BATCH];
    for epoch in 1..=EPOCHS {
        for n in (2..=train.len()).rev() {
            train.swap(n - 1, (random.next() % n as u64) as usize); // Fisher and Yates
        }
        let (mut train_squares, mut test_squares) = (0.0, 0.0);
        let batches: Vec<&[Rating]> = train.chunks(BATCH).collect();
        let mut declared: Vec<Batch> = Vec::new(); // of this epoch
        for (b, some) in batches.iter().enumerate() {
            while declared.len() < batches.len() && declared.len() <= b + AHEAD {
                let (users, items) = keys(batches[declared.len()]);
                let ahead = (declared.len() - b) as u64;
                declared.push(trainer.prefetch_all(step + ahead, &ops(&tables, &users, &items))?);
            }
            let batch = &declared[b];
            trainer.step_begin(step)?;
            let mut lookups = Vec::new();
            for (t, rows) in rows.iter_mut().enumerate() {
                lookups.push(batch.op(t).rows(&mut rows[..some.len() * width(t)]));
            }
            trainer.lookup_all(&mut lookups)?;
            train_squares = compare(mean, some, &rows, &mut errors, train_squares);
            for k in 0..some.len() {
                for c in 0..DIM {
                    grads[0][k * DIM + c] = -errors[k] * rows[1][k * DIM + c]; // of half the squared error
                    grads[1][k * DIM + c] = -errors[k] * rows[0][k * DIM + c];
                }
                grads[2][k] = -errors[k];
                grads[3][k] = -errors[k];
            }
            let mut pushes = Vec::new();
            for (t, grads) in grads.iter().enumerate() {
                pushes.push(batch.op(t).grads(&grads[..some.len() * width(t)]));
            }
            trainer.push_grad_all(&mut pushes)?;
            trainer.step_end(step)?;
            step += 1;
        }
        for some in test.chunks(BATCH) {
            let (users, items) = keys(some);
            let mut reads = Vec::new(); // rows that are missing read as zeros
            for ((t, op), rows) in ops(&tables, &users, &items)
                .into_iter()
                .enumerate()
                .zip(&mut rows)
            {
                reads.push(op.rows(&mut rows[..some.len() * width(t)]));
            }
            engine.read_all(&mut reads, Timeout::Engine)?;
            test_squares = compare(mean, some, &rows, &mut errors, test_squares);
        }
        let rmse = |squares: f64, ratings: &[Rating]| (squares / ratings.len() as f64).sqrt();
        println!(
            "epoch {epoch:2}: train RMSE {:.4}, test RMSE {:.4}",
            rmse(train_squares, &train),
            rmse(test_squares, &test)
        );
    }
    if path.is_none() {
        let noise: f64 = test.iter().map(|r| r.noise * r.noise).sum();
        println!(
            "known optimum: test RMSE {:.4}",
            (noise / test.len() as f64).sqrt()
        );
    }
    Ok(engine.close()?)
}
