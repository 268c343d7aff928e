"""torch beside the engine: whole steps, and index_select into pinned memory with a copy.

A worker of gpu_bench: reads a command a line, answers with a line of JSON.

prepare_gather rows dim batch keys_file device
gather         seconds=S   seconds of an index_select of a batch on the CPU, and its copy to the device
prepare        the same, and side=torch_gpu|torch_cpu optimizer=sgd|adam|rowwise_adagrad
run            steps=N     seconds of a step

torch_gpu: nn.Embedding(sparse=True) on the device, as one would where the table fits. torch_cpu: the
same on the CPU, with copies of rows to the device and of gradients back. torch has no row-wise Adagrad:
Adagrad, with as many floats of state as the row has, stands for it. The backward pass of the rest of
the model is a copy of a pattern, as on the engine's side.
"""

import json
import sys
import time

import torch

answers = sys.stdout
sys.stdout = sys.stderr  # libraries write there


class Worker:

  def common(self, p):
    self.device = torch.device(p['device'])
    self.on_gpu = self.device.type == 'cuda'
    self.rows, self.dim, self.batch = int(p['rows']), int(p['dim']), int(p['batch'])
    with open(p['keys_file'], 'rb') as f:
      keys = torch.frombuffer(bytearray(f.read()), dtype=torch.int64)
    self.keys = self.pinned(keys.view(-1, self.batch))
    self.next = 0

  def pinned(self, tensor):
    return tensor.pin_memory() if self.on_gpu else tensor

  def sync(self):
    if self.on_gpu:
      torch.cuda.synchronize(self.device)

  def batch_keys(self):
    keys = self.keys[self.next % len(self.keys)]
    self.next += 1
    return keys

  def prepare_gather(self, p):
    self.common(p)
    self.table = torch.rand(self.rows, self.dim)
    self.staging = self.pinned(torch.empty(self.batch, self.dim))
    self.out = torch.empty(self.batch, self.dim, device=self.device)
    self.gather_once()
    return {}

  def gather_once(self):
    torch.index_select(self.table, 0, self.batch_keys(), out=self.staging)
    self.out.copy_(self.staging, non_blocking=True)
    self.sync()

  def gather(self, p):
    seconds, calls = float(p['seconds']), 0
    start = time.perf_counter()
    while calls == 0 or time.perf_counter() - start < seconds:
      self.gather_once()
      calls += 1
    return {'seconds': (time.perf_counter() - start) / calls}

  def prepare(self, p):
    self.common(p)
    self.side = p['side']
    where = self.device if self.side == 'torch_gpu' else torch.device('cpu')
    self.embedding = torch.nn.Embedding(self.rows, self.dim, sparse=True, device=where)
    make = {'sgd': lambda ps: torch.optim.SGD(ps, lr=0.01),
            'adam': lambda ps: torch.optim.SparseAdam(ps, lr=0.01),
            'rowwise_adagrad': lambda ps: torch.optim.Adagrad(ps, lr=0.01)}
    self.optimizer = make[p['optimizer']](self.embedding.parameters())
    self.pattern = (torch.rand(self.batch, self.dim, device=self.device) - 0.5) * 2e-3
    self.grads = torch.empty_like(self.pattern)
    self.rows_out = torch.empty_like(self.pattern)
    self.host_grads = self.pinned(torch.empty(self.batch, self.dim))
    self.host_rows = self.pinned(torch.empty(self.batch, self.dim))
    for _ in range(2):
      self.step()
    self.sync()
    return {}

  def step(self):
    self.optimizer.zero_grad(set_to_none=True)
    keys = self.batch_keys()
    if self.side == 'torch_gpu':
      rows = self.embedding(keys.to(self.device, non_blocking=True))
      self.grads.copy_(self.pattern)
      rows.backward(self.grads)
    else:
      rows = self.embedding(keys)
      self.host_rows.copy_(rows.detach())
      self.rows_out.copy_(self.host_rows, non_blocking=True)
      self.grads.copy_(self.pattern)
      self.host_grads.copy_(self.grads, non_blocking=True)
      self.sync()
      rows.backward(self.host_grads)
    self.optimizer.step()

  def run(self, p):
    steps = int(p['steps'])
    self.step()
    self.sync()
    start = time.perf_counter()
    for _ in range(steps):
      self.step()
    self.sync()
    return {'seconds': (time.perf_counter() - start) / steps}


def main():
  worker = Worker()
  commands = {'prepare_gather': worker.prepare_gather, 'gather': worker.gather,
              'prepare': worker.prepare, 'run': worker.run}
  for line in sys.stdin:
    words = line.split()
    if not words or words[0] == 'quit':
      break
    try:
      answer = commands[words[0]](dict(word.split('=', 1) for word in words[1:]))
    except Exception as e:  # pylint: disable=broad-except
      answer = {'error': f'{type(e).__name__}: {e}'.replace('\n', ' ').replace('"', "'")[:300]}
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == '__main__':
  main()
