#!/usr/bin/env python3
"""Frugal in one page of Python: open an engine, train two rows for ten steps, read them.

    pip install ./bindings/python numpy && python examples/hello.py

The same program in other languages: hello.c, hello.cpp, hello.rs, hello.jl.
"""

import numpy as np

import frugal

# Rows 7 and 42 learn to be ones. Key 7 comes twice: its gradients are summed.
keys = np.array([7, 42, 7])

with frugal.Engine() as engine:  # all defaults: one rank, keys declared up to ten steps ahead
    items = engine.create_table("items", rows=1000, dim=4, optimizer=frugal.SGD(lr=0.1))
    trainer = engine.create_trainer()
    batch = trainer.prefetch(0, items, keys)
    for step in range(10):
        # What the next step needs is brought up to date while this one computes.
        later = trainer.prefetch(step + 1, items, keys)
        with trainer.step(step):
            rows = trainer.lookup(batch)
            # Half the squared distance from one, whose gradient is row - 1.
            grads = rows - np.float32(1)
            loss = sum(0.5 * g * g for g in grads.ravel().tolist())
            trainer.push_grad(batch, grads)
        print(f"step {step}: loss {loss:.6f}")
        batch = later
    # Outside steps rows are read by their keys.
    for key, row in zip(keys[:2], items.get(keys[:2])):
        print(f"row {key}:", *(f"{x:.6f}" for x in row))
