"""The side `dcp`: torch's sparse training, while torch.distributed.checkpoint.async_save writes the table.

Commands as in checkpoint_worker.cpp: prepare, run mode=none|dcp, free.
"""

import shutil
import time
import warnings

import numpy
import torch
import torch.distributed.checkpoint as dcp

import peer

warnings.filterwarnings('ignore')


class Dcp:

  def prepare(self, params):
    rows, dim, self.batch = int(params['rows']), int(params['dim']), int(params['batch'])
    self.device_s, self.folder = int(params['device_ns']) * 1e-9, params['folder']
    self.embedding = torch.nn.Embedding(rows, dim, sparse=True, _weight=torch.full((rows, dim), 0.01))
    kind = torch.optim.SparseAdam if params['opt'] == 'adam' else torch.optim.Adagrad
    self.optimizer = kind(self.embedding.parameters(), lr=0.01)
    self.keys = torch.from_numpy(numpy.fromfile(params['keys_file'], dtype=numpy.int64))
    self.grads = torch.rand(self.batch, dim) * 2e-3 - 1e-3
    self.number, self.saving, self.saves = 0, None, 0
    for _ in range(5):
      self.step()
    return {}

  def step(self):
    begin = self.number * self.batch % (len(self.keys) - self.batch)
    self.optimizer.zero_grad(set_to_none=True)
    rows = self.embedding(self.keys[begin:begin + self.batch])
    done = time.perf_counter() + self.device_s
    while time.perf_counter() < done:
      pass
    rows.backward(self.grads)
    self.optimizer.step()
    self.number += 1

  def save(self):
    if self.saving is not None and not self.saving.done():
      return
    if self.saving is not None:
      self.saving.result()
      self.saves += 1
    shutil.rmtree(self.folder, ignore_errors=True)
    state = {'weight': self.embedding.weight, 'state': self.optimizer.state_dict()}
    self.saving = dcp.async_save(state, checkpoint_id=self.folder, no_dist=True)

  def free(self, _):
    self.embedding = self.optimizer = None
    return {}

  def run(self, params):
    mode, seconds = params['mode'], float(params['seconds'])
    times, self.saves = [], 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
      begin = time.perf_counter()
      if mode == 'dcp':
        self.save()
      self.step()
      times.append((time.perf_counter() - begin) * 1e6)
    if self.saving is not None:
      self.saving.result()
      self.saves, self.saving = self.saves + 1, None
    times.sort()
    at = lambda share: times[min(len(times) - 1, int(share * len(times)))]
    return {'step_p50': at(.5), 'step_p99': at(.99), 'step_p999': at(.999),
            'step_mean': sum(times) / len(times), 'steps': len(times), 'checkpoints': self.saves}


side = Dcp()
peer.reply_to({'prepare': side.prepare, 'run': side.run, 'free': side.free})
