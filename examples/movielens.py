#!/usr/bin/env python3
"""Biased matrix factorization: rating = mean + user bias + item bias + user row . item row.

    movielens.py [FILE]    lines of FILE: user TAB item TAB rating TAB anything, as in MovieLens' u.data

Without a file it makes ratings from planted rows and noise, so that the best possible error is known. README.md says
exactly what is computed; the other languages print the same numbers.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Any, List, NamedTuple, Optional, Tuple

import numpy as np
from numpy.typing import NDArray

import frugal

DIM, BATCH, EPOCHS, AHEAD = 4, 256, 10, 4
USERS, ITEMS, RATINGS = 400, 300, 50000  # of the planted set


class Ratings(NamedTuple):
    users: NDArray[np.uint64]
    items: NDArray[np.uint64]
    values: NDArray[np.float32]
    noise: NDArray[np.float64]  # planted: what no model can know

    def take(self, index: Any) -> Ratings:
        return Ratings(self.users[index], self.items[index], self.values[index], self.noise[index])


# --- Data ---


class Random:
    """splitmix64, many numbers at a time."""

    def __init__(self, state: int) -> None:
        self.state = state

    def next(self, count: int) -> NDArray[np.uint64]:
        gamma = 0x9E3779B97F4A7C15
        z = np.uint64(self.state) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(gamma)
        self.state = (self.state + count * gamma) % 2**64
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    def normal(self, count: int) -> NDArray[np.float64]:
        return normal(self.next(12 * count).reshape(count, 12))


def normal(random: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Nearly normal, from 12 numbers each: sums of multiples of 2**-24, exact in any order."""
    sums: NDArray[np.float64] = (random >> np.uint64(40)).astype(np.float64).sum(axis=1)
    return sums / 16777216 - 6


def plant() -> Ratings:
    random = Random(1)
    user_bias, item_bias = 0.4 * random.normal(USERS), 0.4 * random.normal(ITEMS)
    users = 0.6 * random.normal(USERS * DIM).reshape(USERS, DIM)
    items = 0.6 * random.normal(ITEMS * DIM).reshape(ITEMS, DIM)
    drawn = random.next(14 * RATINGS).reshape(RATINGS, 14)
    u, i = drawn[:, 0] % np.uint64(USERS), drawn[:, 1] % np.uint64(ITEMS)
    noise = 0.3 * normal(drawn[:, 2:])
    value = 3.5 + user_bias[u] + item_bias[i]
    for c in range(DIM):
        value = value + users[u, c] * items[i, c]
    return Ratings(u, i, (value + noise).astype(np.float32), noise)


LINE = re.compile(
    rb"[ \t\r]*([0-9]+)[ \t\r]+([0-9]+)[ \t\r]+([+-]?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)(?:[ \t\r].*)?\n?", re.DOTALL
)


def parse(line: bytes) -> Optional[Tuple[int, int, np.float32]]:
    match = LINE.fullmatch(line)
    if match is None:
        return None
    user, item = int(match[1]), int(match[2])
    with np.errstate(over="ignore"):
        value = np.float32(float(match[3]))
    return (user, item, value) if max(user, item) < 2**64 and np.isfinite(value) else None


def load(path: str) -> Ratings:
    rows = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip(b" \t\r\n"):
                row = parse(line)
                if row is None:
                    sys.exit(f"{path}: line {number} is not of the form user, item, rating")
                rows.append(row)
    if len(rows) < 10:
        sys.exit(f"{path}: {len(rows)} ratings, at least 10 are needed")
    users, items, values = zip(*rows)
    return Ratings(
        np.array(users, np.uint64), np.array(items, np.uint64), np.array(values, np.float32), np.zeros(len(rows))
    )


def add(values: NDArray[np.float64], total: float = 0.0) -> float:
    """One term after another; NumPy's own sum has another order, and so other last digits."""
    for value in values.tolist():
        total += value
    return total


# --- Model ---


def make_ops(tables: List[frugal.Table], some: Ratings, batch: Optional[frugal.Batch] = None) -> List[frugal.Op]:
    """Ops on the users and items of some ratings, by their keys or by a declared batch."""
    if batch is not None:
        return [frugal.Op(table, batch=batch, part=n) for n, table in enumerate(tables)]
    return [frugal.Op(table, (some.users, some.items)[n % 2]) for n, table in enumerate(tables)]


def errors(mean: np.float32, some: Ratings, rows: List[NDArray[np.float32]]) -> NDArray[np.float32]:
    users, items, user_bias, item_bias = rows
    guess = mean + user_bias[:, 0] + item_bias[:, 0]
    for c in range(DIM):
        guess = guess + users[:, c] * items[:, c]
    return some.values - guess


def squares(error: NDArray[np.float32]) -> NDArray[np.float64]:
    return error.astype(np.float64) ** 2


def main() -> None:
    planted = len(sys.argv) < 2
    ratings = plant() if planted else load(sys.argv[1])
    held = np.arange(len(ratings.values)) % 10 == 9  # every tenth rating is for the test
    train, test = ratings.take(~held), ratings.take(held)
    count = len(train.values)
    mean = np.float32(add(train.values.astype(np.float64)) / count)
    print(f"{count} ratings to train, {len(test.values)} to test, mean {mean:.4f}")

    with frugal.Engine() as engine:
        # Hashed: any id will do; rows come with their first use.
        adagrad = frugal.Adagrad(lr=0.1, weight_decay_l2=0.02)
        tables = [
            engine.create_table(name, rows=count, dim=dim, hashed=True, init=init, optimizer=adagrad)
            for name, dim, init in (
                ("users", DIM, frugal.Normal(0, 0.1)),
                ("items", DIM, frugal.Normal(0, 0.1)),
                ("user biases", 1, frugal.Constant(0)),
                ("item biases", 1, frugal.Constant(0)),
            )
        ]
        trainer = engine.create_trainer()
        random, step, order = Random(2), 0, list(range(count))
        for epoch in range(1, EPOCHS + 1):
            sizes = np.arange(count, 1, -1, dtype=np.uint64)
            for n, other in enumerate((random.next(count - 1) % sizes).tolist()):  # Fisher and Yates
                last = count - 1 - n
                order[last], order[other] = order[other], order[last]
            shuffled = train.take(np.array(order))
            batches = [shuffled.take(slice(at, at + BATCH)) for at in range(0, count, BATCH)]
            declared: List[frugal.Batch] = []
            train_squares = test_squares = 0.0
            for b, some in enumerate(batches):
                while len(declared) < min(len(batches), b + AHEAD + 1):
                    ahead = len(declared)
                    declared.append(trainer.prefetch(step + ahead - b, make_ops(tables, batches[ahead])))
                ops = make_ops(tables, some, declared[b])
                with trainer.step(step):
                    rows = trainer.lookup(ops)
                    error = errors(mean, some, rows)
                    train_squares = add(squares(error), train_squares)
                    down = -error[:, None]  # gradients of half the squared error
                    for op, grads in zip(ops, (down * rows[1], down * rows[0], down, down)):
                        op.grads = grads
                    trainer.push_grad(ops)
                step += 1
            for at in range(0, len(test.values), BATCH):  # rows that are missing read as zeros
                some = test.take(slice(at, at + BATCH))
                test_squares = add(squares(errors(mean, some, engine.read(make_ops(tables, some)))), test_squares)
            print(
                f"epoch {epoch:2}: train RMSE {math.sqrt(train_squares / count):.4f}, "
                f"test RMSE {math.sqrt(test_squares / len(test.values)):.4f}"
            )
    if planted:
        print(f"known optimum: test RMSE {math.sqrt(add(test.noise**2) / len(test.values)):.4f}")


if __name__ == "__main__":
    main()
