"""Compares frugal.torch with a trainer on a device with one on the CPU: outputs and rows, bit for bit.

    torch_check.py --device cuda:0 --engine build/.../libfrugal.so --results FILE

Prints a line of JSON for each case. Gradients are new in every step. Every third batch has a row with more than 32
occurrences, so its fold has several runs. With `--device sim:N` both sides are on the CPU, which only shows that this
program works.
"""

import argparse
import json
import os
import pathlib
import sys
import time
import traceback

SOURCES = pathlib.Path(__file__).resolve().parents[2] / 'bindings/python/src'
ROWS, BATCH, STEPS = 2000, 512, 12


class Sides:
  """The same modules, trained on the device and on the CPU."""

  def __init__(self, torch, frugal, layers, name):
    self.torch, self.frugal, self.layers = torch, frugal, layers
    self.name = name if name.startswith('cuda:') else 'cpu'
    self.plain = None  # what a model gives that has no cache and declares nothing

  def same(self, here, there, what):
    here, there = here.detach().cpu(), there.detach().cpu()
    if here.shape != there.shape or not self.torch.equal(
        here.view(self.torch.int32), there.view(self.torch.int32)):
      raise AssertionError(f'{what}: the two sides differ')
    return here.numel()

  def batches(self, dim, bags):
    for step in range(STEPS):
      keys = (self.torch.rand(BATCH)**3 * ROWS).long().clamp(max=ROWS - 1)
      if step % 3 == 0:
        keys[:BATCH // 2] = 5
      cuts = self.torch.sort(self.torch.randint(0, BATCH + 1, (63,)))[0]
      offsets = self.torch.cat([self.torch.zeros(1, dtype=self.torch.int64), cuts])
      grads = self.torch.randn(offsets.numel() if bags else BATCH, dim)
      yield keys, offsets, self.torch.rand(BATCH), grads

  def train(self, name, weight, mode, optimizer, batches, cache, weighted):
    device = self.torch.device(name)
    more = {'cache_ratio': cache} if cache and name != 'cpu' else {}
    with self.frugal.Engine(lookahead=8) as engine, engine.create_trainer(device=name, **more) as trainer:
      common = {'_weight': weight.clone(), 'trainer': trainer, 'optimizer': optimizer}
      if mode == 'rows':
        module = self.layers.Embedding(*weight.shape, **common)
      else:
        module = self.layers.EmbeddingBag(*weight.shape, mode=mode, **common)
      step, outputs = self.layers.Optimizer(module), []
      for keys, offsets, factors, grads in batches:
        inputs = [keys] if mode == 'rows' else [keys, offsets]
        inputs = [tensor.to(device) for tensor in inputs]
        out = module(*inputs, **({'per_sample_weights': factors.to(device)} if weighted else {}))
        outputs.append(out.detach().cpu().clone())
        out.backward(grads.to(device))
        step.step()
        step.zero_grad()
      return outputs, module.weight.detach().cpu().clone()

  def modules(self, mode, optimizer, dim, cache, weighted=False):
    kind = getattr(self.frugal, optimizer)
    weight = self.torch.randn(ROWS, dim)
    batches = list(self.batches(dim, mode != 'rows'))
    arguments = (weight, mode, kind(lr=0.1), batches, cache, weighted)
    there, here = self.train('cpu', *arguments), self.train(self.name, *arguments)
    compared = sum(self.same(a, b, f'output of step {i}') for i, (a, b) in enumerate(zip(here[0], there[0])))
    return compared + self.same(here[1], there[1], 'rows')

  def model(self, ahead, cache, own_stream, moved=False):
    """Losses and rows of a model with dense layers: they depend on nothing but the data."""
    torch = self.torch
    torch.manual_seed(3)
    device = torch.device(self.name)
    more = {'cache_ratio': cache} if cache else {}
    first = 'cpu' if moved else self.name
    with self.frugal.Engine(lookahead=8) as engine, engine.create_trainer(device=first, **more) as trainer:
      bags = self.layers.EmbeddingBag(5000, 16, mode='sum', trainer=trainer)
      rows = self.layers.Embedding(3000, 16, trainer=trainer)
      top = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
      torch.nn.ModuleList([bags, rows, top]).to(device)
      parameters = [*bags.parameters(), *rows.parameters(), *top.parameters()]
      optimizer = torch.optim.Adagrad(parameters, lr=0.1)
      data = []
      for _ in range(60):
        batch = torch.randint(0, 5000, (256, 4)), torch.randint(0, 3000, (256,))
        truth = ((batch[0].sum(1) + batch[1]) % 2).float()
        data.append([tensor.to(device) for tensor in (*batch, truth)])
      stream = torch.cuda.Stream(device) if own_stream and device.type == 'cuda' else None
      if stream:
        stream.wait_stream(torch.cuda.current_stream(device))
      losses = []
      with torch.cuda.stream(stream):
        for _ in range(2):
          source = data
          if ahead:
            source = self.layers.Lookahead(data, lambda d: {bags: d[0], rows: d[1]}, measure=False)
          for many, one, truth in source:
            out = top(torch.cat([bags(many), rows(one)], dim=1)).squeeze(1)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(out, truth)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
      if stream:
        stream.synchronize()
      if not sum(losses[-20:]) < sum(losses[:20]):
        raise AssertionError('the model has learned nothing')
      return [torch.stack(losses).cpu(), *(m.weight.detach().cpu().clone() for m in (bags, rows))]

  def models(self, ahead, cache, own_stream, moved=False):
    self.plain = self.plain or self.model(False, 0, False)
    return sum(self.same(a, b, 'losses and rows')
               for a, b in zip(self.model(ahead, cache, own_stream, moved), self.plain))


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('--device', required=True)
  parser.add_argument('--engine', required=True)
  parser.add_argument('--results', required=True)
  parser.add_argument('--quick', action='store_true')
  args = parser.parse_args()
  os.environ['FRUGAL_LIBRARY'] = args.engine
  sys.path.insert(0, str(SOURCES))
  failed = 0

  def tell(line):
    with open(args.results, 'a', encoding='utf-8') as f:
      f.write(json.dumps(line) + '\n')
    print(json.dumps(line), flush=True)

  try:
    import torch
  except ImportError:
    tell({'case': 'torch', 'params': {}, 'skipped': 'this Python has no torch'})
    return 0
  import frugal
  import frugal.torch as layers
  sides = Sides(torch, frugal, layers, args.device)
  cases = [(sides.modules, {'mode': mode, 'optimizer': optimizer, 'dim': 16, 'cache': cache})
           for mode in ('rows', 'sum', 'mean', 'max')
           for optimizer in ('SGD', 'Momentum', 'Adagrad', 'RowWiseAdagrad', 'Adam', 'RMSProp', 'FTRL')
           for cache in (0, 0.25)]
  cases += [(sides.modules, {'mode': 'sum', 'optimizer': 'Adagrad', 'dim': 16, 'cache': 0.25, 'weighted': True}),
            (sides.modules, {'mode': 'rows', 'optimizer': 'Adam', 'dim': 7, 'cache': 0.25})]
  cases += [(sides.models, {'ahead': ahead, 'cache': cache, 'own_stream': own_stream})
            for ahead in (False, True) for cache in (0, 0.3) for own_stream in (False, True)]
  cases += [(sides.models, {'ahead': ahead, 'cache': 0.3, 'own_stream': False, 'moved': True})
            for ahead in (False, True)]
  for run, params in cases[::9] if args.quick else cases:
    began = time.monotonic()
    torch.manual_seed(7)
    line = {'case': 'torch', 'params': params, 'aim': 'bit for bit', 'met': True}
    try:
      line['figures'] = {'floats_compared': run(**params)}
    except Exception as e:  # prints a case that fails, and runs the next one
      failed += 1
      line.update(met=False, error=f'{e}\n{traceback.format_exc()[-1200:]}')
    tell({**line, 'seconds': round(time.monotonic() - began, 2)})
  return 1 if failed else 0


if __name__ == '__main__':
  sys.exit(main())
