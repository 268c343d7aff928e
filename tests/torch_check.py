"""Optimizers of libfrugal against those of torch.optim, through the C interface alone.

Usage: torch_check.py path/to/libfrugal.so
Exit status: 0 all agree, 1 some do not, 77 torch is not installed.

A table of a few rows is trained for some steps with random gradients and repeated keys; weights
and optimizer state must agree with torch to a relative 1e-5. torch adds and rounds in another
order, so bits are not compared here. Optimizers that torch applies to every row (momentum,
RMSprop) get batches with every key; for the others each batch has a part of the rows, the rest of
which must not move.
"""

import ctypes
import sys
import warnings

try:
  import torch
except ImportError:
  print('torch is not installed: skipped')
  sys.exit(77)

c_void_p = ctypes.c_void_p
c_float = ctypes.c_float
c_int32 = ctypes.c_int32
c_int64 = ctypes.c_int64
c_size_t = ctypes.c_size_t
c_uint32 = ctypes.c_uint32
c_uint64 = ctypes.c_uint64

SGD, MOMENTUM, ADAGRAD, ROWWISE_ADAGRAD, ADAM, RMSPROP, FTRL = range(7)
NESTEROV = 1
WITH_STATE = 1
TIMEOUT_MS = 60000
ROWS, DIM, STEPS, SEED = 37, 24, 25, 20


class Optimizer(ctypes.Structure):
  _fields_ = [('struct_size', c_size_t), ('kind', c_int32)] + [
      (name, c_float) for name in (
          'lr', 'eps', 'momentum', 'dampening', 'beta1', 'beta2', 'rho', 'ftrl_lambda1',
          'ftrl_lambda2', 'ftrl_beta', 'initial_accumulator', 'weight_decay_l2', 'weight_decay',
          'clip_value', 'clip_norm', 'weight_bound', 'grad_scale')
  ] + [('flags', c_uint32)]


class TableConfig(ctypes.Structure):
  _fields_ = [
      ('struct_size', c_size_t), ('name', ctypes.c_char_p), ('key_space', c_int32),
      ('dtype', c_int32), ('rows', c_uint64), ('dim', c_uint32), ('init', c_int32),
      ('init_a', c_float), ('init_b', c_float), ('nan_policy', c_int32), ('flags', c_uint32),
      ('optimizer', Optimizer)
  ]


class TrainerConfig(ctypes.Structure):
  _fields_ = [('struct_size', c_size_t), ('rank', c_uint32), ('flags', c_uint32),
              ('device', ctypes.c_char_p), ('cache_bytes', c_uint64),
              ('cache_ratio', ctypes.c_double)]


class Op(ctypes.Structure):
  _fields_ = [
      ('struct_size', c_size_t), ('table', c_void_p), ('batch', c_void_p), ('part', c_uint32),
      ('pooling', c_int32), ('keys', c_void_p), ('count', c_size_t), ('offsets', c_void_p),
      ('bags', c_size_t), ('weights', c_void_p), ('weight_grads_out', c_void_p),
      ('rows_out', c_void_p), ('grads', c_void_p), ('row_stride', c_size_t),
      ('found_out', c_void_p), ('padding_key', c_uint64), ('flags', c_uint32),
      ('reserved', c_uint32)
  ]


class Error(ctypes.Structure):
  _fields_ = [('status', c_int32), ('system_code', c_int32), ('device_code', c_int32),
              ('reserved', c_int32), ('message', ctypes.c_char_p)]


class Library:
  """The calls that this check needs; each raises if the library returns an error."""

  def __init__(self, path):
    self.lib = ctypes.CDLL(path)

  def call(self, name, *arguments):
    status = getattr(self.lib, name)(*arguments)
    if status != 0:
      error = Error()
      self.lib.frugal_last_error(ctypes.byref(error))
      raise RuntimeError(f'{name}: {status}: {error.message.decode()}')

  def make(self, kind, init):
    value = kind()
    getattr(self.lib, init)(ctypes.byref(value))
    if value.struct_size != ctypes.sizeof(kind):
      raise RuntimeError(f'{init}: this script knows another layout of the struct')
    return value


def pointer(tensor):
  return c_void_p(tensor.data_ptr())


class Table:
  """One engine with one trainer and one dense table, set to `weight`."""

  def __init__(self, lib, weight, settings):
    self.lib = lib
    self.engine, self.table, self.trainer = c_void_p(), c_void_p(), c_void_p()
    lib.call('frugal_open', None, ctypes.byref(self.engine))
    config = lib.make(TableConfig, 'frugal_table_config_init')
    config.name = b'table'
    config.rows, config.dim = weight.shape
    for name, value in settings.items():
      setattr(config.optimizer, name, value)
    lib.call('frugal_table_create', self.engine, ctypes.byref(config), ctypes.byref(self.table))
    config = lib.make(TrainerConfig, 'frugal_trainer_config_init')
    lib.call('frugal_trainer_create', self.engine, ctypes.byref(config),
             ctypes.byref(self.trainer))
    self.keys = torch.arange(weight.shape[0])
    lib.call('frugal_put', self.table, pointer(self.keys), c_size_t(weight.shape[0]), c_uint32(0),
             pointer(weight), c_size_t(0))

  def step(self, step, keys, grads):
    op = self.lib.make(Op, 'frugal_op_init')
    op.table, op.keys, op.count, op.grads = (self.table.value, keys.data_ptr(), len(keys),
                                             grads.data_ptr())
    self.lib.call('frugal_step_begin', self.trainer, c_uint64(step), c_int64(TIMEOUT_MS))
    self.lib.call('frugal_push_grad', self.trainer, ctypes.byref(op), c_size_t(1))
    self.lib.call('frugal_step_end', self.trainer, c_uint64(step), c_uint32(0))

  def rows(self, state_floats):
    out = torch.empty(len(self.keys), DIM + state_floats)
    self.lib.call('frugal_get', self.table, pointer(self.keys), c_size_t(len(self.keys)),
                  c_uint32(WITH_STATE), pointer(out), c_size_t(0), None)
    return out

  def close(self):
    self.lib.call('frugal_close', self.engine)


def cases():
  """Name, Frugal's settings, torch's optimizer, its state columns, each key in each batch."""
  optim = torch.optim
  common = {'lr': 0.05, 'eps': 1e-8}
  yield ('SGD', {'kind': SGD, 'lr': 0.05}, lambda p: optim.SGD(p, lr=0.05), [], False)
  yield ('SGD, weight decay', {'kind': SGD, 'lr': 0.05, 'weight_decay_l2': 0.1},
         lambda p: optim.SGD(p, lr=0.05, weight_decay=0.1), [], True)
  yield ('momentum', {'kind': MOMENTUM, 'lr': 0.05, 'momentum': 0.9},
         lambda p: optim.SGD(p, lr=0.05, momentum=0.9), ['momentum_buffer'], True)
  yield ('Nesterov', {'kind': MOMENTUM, 'lr': 0.05, 'momentum': 0.8, 'flags': NESTEROV},
         lambda p: optim.SGD(p, lr=0.05, momentum=0.8, nesterov=True), ['momentum_buffer'], True)
  yield ('Nesterov, weight decay',
         {'kind': MOMENTUM, 'lr': 0.05, 'momentum': 0.8, 'flags': NESTEROV,
          'weight_decay_l2': 0.01},
         lambda p: optim.SGD(p, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.01),
         ['momentum_buffer'], True)
  yield ('Adagrad', {'kind': ADAGRAD, **common}, lambda p: optim.Adagrad(p, lr=0.05, eps=1e-8),
         ['sum'], False)
  yield ('Adagrad, initial accumulator',
         {'kind': ADAGRAD, 'initial_accumulator': 0.1, **common},
         lambda p: optim.Adagrad(p, lr=0.05, eps=1e-8, initial_accumulator_value=0.1), ['sum'],
         False)
  yield ('SparseAdam', {'kind': ADAM, 'beta1': 0.9, 'beta2': 0.99, **common},
         lambda p: optim.SparseAdam(p, lr=0.05, eps=1e-8, betas=(0.9, 0.99)),
         ['exp_avg', 'exp_avg_sq'], False)
  # torch's dense Adam adds eps after the bias correction, so it must be too small to matter.
  yield ('Adam, every row', {'kind': ADAM, 'lr': 0.05, 'eps': 1e-15, 'beta2': 0.99},
         lambda p: optim.Adam(p, lr=0.05, eps=1e-15, betas=(0.9, 0.99)),
         ['exp_avg', 'exp_avg_sq'], True)
  yield ('RMSprop', {'kind': RMSPROP, 'rho': 0.9, **common},
         lambda p: optim.RMSprop(p, lr=0.05, alpha=0.9, eps=1e-8), ['square_avg'], True)


def difference(got, expected):
  """The largest error in units of what is allowed."""
  return ((got - expected).abs() / (1e-5 * expected.abs() + 1e-6)).max().item()


def check(lib, name, settings, make, columns, every_key):
  torch.manual_seed(SEED)
  weight = torch.randn(ROWS, DIM) * 0.3
  table = Table(lib, weight, settings)
  sparse = not every_key
  embedding = torch.nn.Embedding(ROWS, DIM, sparse=sparse, _weight=weight.clone())
  optimizer = make(embedding.parameters())
  for step in range(STEPS):
    keys = torch.randint(0, ROWS * 2 // 3, (50,))
    if every_key:
      keys = torch.cat([keys, torch.randperm(ROWS)])
    grads = torch.randn(len(keys), DIM)
    table.step(step, keys, grads)
    optimizer.zero_grad(set_to_none=True)
    embedding(keys).backward(grads)
    optimizer.step()
  rows = table.rows(len(columns) * DIM)
  table.close()
  expected = [embedding.weight.detach()]
  state = optimizer.state[embedding.weight]
  expected += [state[column] for column in columns]
  worst = difference(rows, torch.cat(expected, dim=1))
  moved = (rows[:, :DIM] != weight).any(dim=1).sum().item()
  fine = worst <= 1 and moved > ROWS // 2 and (every_key or moved <= ROWS * 2 // 3)
  verdict = 'ok  ' if fine else 'FAIL'
  print(f'{verdict} {name}: {worst:.3f} of the allowed error, {moved} rows moved')
  return fine


def main():
  if len(sys.argv) != 2:
    print(__doc__)
    return 2
  torch.set_num_threads(1)
  warnings.filterwarnings('ignore', message='Sparse invariant checks')
  lib = Library(sys.argv[1])
  fine = [check(lib, *case) for case in cases()]
  return 0 if all(fine) else 1


if __name__ == '__main__':
  sys.exit(main())
