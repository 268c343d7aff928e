"""What the Python peers share: the workers' line protocol (bench/harness.h) and their inputs."""

import json
import sys
import time

import numpy as np
import torch


class Peer:
  """A side of a benchmark; a subclass builds its table and does one step or one gather."""

  def __init__(self):
    self.table_shape = None
    self.per_run = 0
    self.next = 0

  # A subclass has make_table(opt, rows, dim, init), train(keys, grads), gather(keys), rows().

  def prepare(self, p):
    torch.set_num_threads(int(p.get('threads', 2)))
    rows, dim, self.batch = int(p['rows']), int(p['dim']), int(p['batch'])
    shape = (p.get('opt', 'sgd'), rows, dim, p['bench'])
    if shape != self.table_shape:
      self.free(p)
      self.make_table(shape[0], rows, dim, 0.01)
      self.table_shape = shape
    self.bench = p['bench']
    keys = np.fromfile(p['keys_file'], dtype=np.int64)
    count = len(keys) // self.batch
    self.batches = torch.from_numpy(keys[:count * self.batch].reshape(count, self.batch))
    generator = torch.Generator().manual_seed(7)
    # The caller's backward: each step's gradients are written into one buffer.
    self.pattern = (torch.rand(2048, dim, generator=generator) - 0.5) * 2e-3
    repeats = (self.batch + 1024) // 2048 + 2
    self.pattern = self.pattern.repeat(repeats, 1)
    self.grads = torch.empty(self.batch, dim)
    self.per_run = 0
    self.fill(0)
    return {}

  def fill(self, step):
    first = step * 197 % 1024
    self.grads.copy_(self.pattern[first:first + self.batch])

  def step(self):
    keys = self.batches[self.next % len(self.batches)]
    if self.bench == 'gather':
      self.gather(keys)
    else:
      self.train(keys, self.grads)
      self.fill(self.next + 1)
    self.next += 1

  def steps(self, count):
    start = time.perf_counter()
    for _ in range(count):
      self.step()
    return time.perf_counter() - start

  def run(self, p):
    seconds = float(p.get('seconds', 0.4))
    if self.per_run == 0:
      self.steps(2)
      self.per_run = max(3, min(2000, int(seconds / (self.steps(2) / 2))))
    self.steps(1 if self.per_run < 10 else 4)  # the first touches after another side's turn
    return {'throughput': self.per_run * self.batch / self.steps(self.per_run)}

  def check(self, p):
    """Trains a small table and writes its rows, to compare them with another side's."""
    torch.set_num_threads(2)
    rows, dim, batch, steps = (int(p[n]) for n in ('rows', 'dim', 'batch', 'steps'))
    self.free(p)
    self.make_table(p['opt'], rows, dim, float(p['init']))
    keys = torch.from_numpy(np.fromfile(p['keys_file'], dtype=np.int64))
    grads = torch.from_numpy(np.fromfile(p['grads_file'], dtype=np.float32))
    for s in range(steps):
      self.train(keys[s * batch:(s + 1) * batch],
                 grads[s * batch * dim:(s + 1) * batch * dim].view(batch, dim))
    self.rows().detach().contiguous().numpy().tofile(p['out_file'])
    self.free(p)
    return {}

  def free(self, _):
    self.drop_table()
    self.table_shape = None
    return {}


def serve(peer):
  reply_to({'prepare': peer.prepare, 'run': peer.run, 'check': peer.check, 'free': peer.free})


def reply_to(commands):
  # Libraries write to stdout; replies go to the real one.
  answers = sys.stdout
  sys.stdout = sys.stderr
  for line in sys.stdin:
    words = line.split()
    if not words:
      continue
    if words[0] == 'quit':
      break
    try:
      params = dict(word.split('=', 1) for word in words[1:])
      answer = commands[words[0]](params)
    except Exception as e:  # pylint: disable=broad-except
      answer = {'error': f'{type(e).__name__}: {e}'.replace('\n', ' ')[:500]}
    print(json.dumps(answer), file=answers, flush=True)
