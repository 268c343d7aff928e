"""torch, to compare with the engine: whole steps, and index_select into pinned memory with a copy.

A worker of gpu_bench: reads one command a line, and replies with a line of JSON.

prepare side=gather|torch_gpu|torch_cpu rows dim batch keys_file device
        optimizer=sgd|adam|rowwise_adagrad (not for gather)
run     side seconds|steps: seconds of a step or, side gather, of an index_select of a batch on the CPU
        into pinned memory and its copy to the device
free    releases the tables

torch_gpu: nn.Embedding(sparse=True) on the device, for tables that fit. torch_cpu: the same on the CPU,
with copies of rows to the device and of gradients back. torch has no row-wise Adagrad: Adagrad replaces
it, which has as many floats of state as the row has elements. The backward pass of the rest of the model
is a copy of a pattern, as on the engine's side.
"""

import json
import sys
import time
import warnings

warnings.filterwarnings('ignore')
answers = sys.stdout
sys.stdout = sys.stderr  # libraries write there
try:
  import torch
except ImportError:
  torch = None


class Side:

  def __init__(self, p):
    self.device = torch.device(p['device'])
    self.on_gpu = self.device.type == 'cuda'
    self.rows, self.dim, self.batch = int(p['rows']), int(p['dim']), int(p['batch'])
    with open(p['keys_file'], 'rb') as f:
      keys = torch.frombuffer(bytearray(f.read()), dtype=torch.int64)
    self.keys = self.pinned(keys.view(-1, self.batch))
    self.next = 0
    self.prepare(p)
    for _ in range(2):
      self.step()
    self.sync()

  def pinned(self, tensor):
    return tensor.pin_memory() if self.on_gpu else tensor

  def sync(self):
    if self.on_gpu:
      torch.cuda.synchronize(self.device)

  def batch_keys(self):
    keys = self.keys[self.next % len(self.keys)]
    self.next += 1
    return keys

  def seconds(self, p):
    """Of a step: as many as are asked for, or for so long."""
    steps, limit = int(p.get('steps', 0)), float(p.get('seconds', 0))
    self.sync()
    start, done = time.perf_counter(), 0
    while done < max(steps, 1) or time.perf_counter() - start < limit:
      self.step()
      done += 1
    self.sync()
    return (time.perf_counter() - start) / done


class Gather(Side):

  def prepare(self, _):
    self.table = torch.full((self.rows, self.dim), 0.5)
    self.staging = self.pinned(torch.empty(self.batch, self.dim))
    self.out = torch.empty(self.batch, self.dim, device=self.device)

  def step(self):
    torch.index_select(self.table, 0, self.batch_keys(), out=self.staging)
    self.out.copy_(self.staging, non_blocking=True)
    self.sync()


class Training(Side):

  def prepare(self, p):
    where = self.device if p['side'] == 'torch_gpu' else torch.device('cpu')
    self.embedding = torch.nn.Embedding(
        self.rows, self.dim, sparse=True,
        _weight=torch.full((self.rows, self.dim), 0.5, device=where))
    make = {'sgd': torch.optim.SGD, 'adam': torch.optim.SparseAdam,
            'rowwise_adagrad': torch.optim.Adagrad}
    self.optimizer = make[p['optimizer']](self.embedding.parameters(), lr=0.01)
    self.pattern = (torch.rand(self.batch, self.dim, device=self.device) - 0.5) * 2e-3
    self.grads = torch.empty_like(self.pattern)


class OnDevice(Training):

  def step(self):
    self.optimizer.zero_grad(set_to_none=True)
    rows = self.embedding(self.batch_keys().to(self.device, non_blocking=True))
    self.grads.copy_(self.pattern)
    rows.backward(self.grads)
    self.optimizer.step()


class OnCpu(Training):

  def prepare(self, p):
    super().prepare(p)
    self.rows_out = torch.empty_like(self.pattern)
    self.host_rows = self.pinned(torch.empty(self.batch, self.dim))
    self.host_grads = self.pinned(torch.empty(self.batch, self.dim))

  def step(self):
    self.optimizer.zero_grad(set_to_none=True)
    rows = self.embedding(self.batch_keys())
    self.host_rows.copy_(rows.detach())
    self.rows_out.copy_(self.host_rows, non_blocking=True)
    self.grads.copy_(self.pattern)
    self.host_grads.copy_(self.grads, non_blocking=True)
    self.sync()
    rows.backward(self.host_grads)
    self.optimizer.step()


SIDES = {'gather': Gather, 'torch_gpu': OnDevice, 'torch_cpu': OnCpu}


def handle(command, p, prepared):
  if torch is None:
    return {'missing': 'this Python has no torch'}
  if command == 'prepare':
    prepared.pop(p['side'], None)
    prepared[p['side']] = SIDES[p['side']](p)
    return {}
  if command == 'run':
    return {'seconds': prepared[p['side']].seconds(p)}
  if command == 'free':
    prepared.clear()
    if torch.cuda.is_available():
      torch.cuda.empty_cache()
    return {}
  raise ValueError('unknown command ' + command)


def main():
  prepared = {}
  for line in sys.stdin:
    words = line.split()
    if not words or words[0] == 'quit':
      break
    try:
      answer = handle(words[0], dict(word.split('=', 1) for word in words[1:]), prepared)
    except Exception as e:  # pylint: disable=broad-except
      answer = {'error': f'{type(e).__name__}: {e}'.replace('\n', ' ').replace('"', "'")[:300]}
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == '__main__':
  main()
