"""Runs bench checkpoint: what checkpoints cost that are written while training goes on (./dev bench checkpoint).

Sides take turns, each in its own process with its own table. `none` has no checkpoints. `frugal` begins the next one
when one is on disk. `stop` makes no step while everything is written. `torch` and `dcp` are PyTorch's sparse training
without and with torch.distributed.checkpoint.async_save. Restoring and frugal-fsck are compared with sequential reads
of the same files, in turns.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import run

BATCH = 65536
CASES = [(rows, dim, opt, keys, device_ms)
         for rows, dim in ((10_000_000, 32), (2_000_000, 128))
         for opt in ('rowwise_adagrad', 'adam')
         for keys in ('uniform', 'zipf0.99')
         for device_ms in (20, 0)]


def median(figures, name):
  return statistics.median(f[name] for f in figures)


def ids(dist, rows):
  path = os.path.join(run.ARGS.data, f'ids_{dist}_{rows}.bin')
  if not os.path.exists(path):
    count = str(BATCH * 64)
    subprocess.run([run.executable('bench_keys', run.ARGS.build), 'ids', dist, str(rows), count, '1', path], check=True)
  return path


def measure(workers, rows, dim, opt, keys, device_ms):
  """Medians of each side's figures."""
  params = dict(opt=opt, rows=rows, dim=dim, batch=BATCH, keys_file=ids(keys, rows), device_ns=int(device_ms * 1e6))
  figures = {}
  for name, worker in workers.items():
    own = dict(params, folder=os.path.join(run.ARGS.data, name))
    if name in ('none', 'torch'):
      own['folder'] = '' if name == 'none' else own['folder']
    worker.ask('prepare ' + run.pairs(**own))
    figures[name] = []
  for _ in range(run.ARGS.rounds):
    for name, worker in workers.items():
      mode = 'none' if name == 'torch' else name
      figures[name].append(worker.ask(f'run seconds={run.ARGS.seconds} mode={mode}'))
  restored = restore(workers['frugal']) if 'frugal' in workers else {}
  for worker in workers.values():
    worker.ask('free')
  return figures, restored


def sequential_rate(folder):
  """Bytes a second of reads of the folder's parameter files without the system's cache."""
  total, start = 0, time.perf_counter()
  for name in sorted(os.listdir(folder)):
    if name.endswith('.rows'):
      path = os.path.join(folder, name)
      subprocess.run(['dd', f'if={path}', 'of=/dev/null', 'bs=4M', 'iflag=direct', 'status=none'], check=True)
      total += os.path.getsize(path)
  return total / (time.perf_counter() - start)


def restore(worker):
  """Rates of restoring and of frugal-fsck, over that of sequential reads; medians of turns."""
  folder, ratios = os.path.join(run.ARGS.data, 'frugal'), {'restore': [], 'fsck': []}
  fsck = os.path.join(run.ARGS.build, 'tools', 'fsck', 'frugal-fsck')
  for _ in range(run.ARGS.rounds):
    rate = sequential_rate(folder)
    answer = worker.ask('restore ' + run.pairs(folder=folder))
    ratios['restore'].append(answer['bytes'] / answer['seconds'] / rate)
    size = sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder))
    start = time.perf_counter()
    subprocess.run([fsck, folder], check=True, stdout=subprocess.DEVNULL)
    ratios['fsck'].append(size / (time.perf_counter() - start) / rate)
  return {name: statistics.median(values) for name, values in ratios.items()}


def report(case, figures, restored):
  rows, dim, opt, keys, device_ms = case
  run.say(f'\n{rows} x {dim}, {opt}, {keys}, {device_ms} ms of device time')
  run.say(f'  {"side":8} {"p50 us":>10} {"p99 us":>10} {"p99.9 us":>10} {"mean us":>10} {"gate p99.9":>10} checkpoints')
  for name, of in figures.items():
    line = [median(of, 'step_p50'), median(of, 'step_p99'), median(of, 'step_p999'), median(of, 'step_mean')]
    gate = f'{median(of, "gate_p999"):10.0f}' if 'gate_p999' in of[0] else f'{"":>10}'
    run.say(f'  {name:8} ' + ' '.join(f'{v:10.0f}' for v in line) + f' {gate} {median(of, "checkpoints"):.0f}')
  if 'frugal' in figures and 'none' in figures:
    none, ours = figures['none'], figures['frugal']
    ratio = {name: median(ours, name) / median(none, name) for name in ('step_p50', 'step_p99', 'step_mean')}
    written = sum(f['bytes'] for f in ours) / max(1, sum(f['rows'] * f['record_bytes'] for f in ours))
    memory = median(ours, 'resident') - median(none, 'resident')
    run.say(f'  frugal / none: median step {ratio["step_p50"]:.3f}, p99 {ratio["step_p99"]:.3f}, throughput '
            f'{1 / ratio["step_mean"]:.3f}; written / records {written:.3f}')
    run.say(f'  copies {median(ours, "copies"):.0f}, gates that waited {median(ours, "waits"):.0f}; memory '
            f'{memory / 2**20:.0f} MiB more, of which 6 bytes a row are {6 * rows / 2**20:.0f}')
  if 'dcp' in figures and 'frugal' in figures:
    slowed = {ours: median(figures[ours], 'step_mean') - median(figures[other], 'step_mean')
              for ours, other in (('frugal', 'none'), ('dcp', 'torch'))}
    run.say(f'  a step is slowed by {slowed["frugal"]:.0f} us, by dcp {slowed["dcp"]:.0f} us')
  if restored:
    run.say(f'  over sequential reads: restore {restored["restore"]:.2f}, frugal-fsck {restored["fsck"]:.2f}')
  return {'case': case, 'figures': figures, 'restored': restored}


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--build', default=os.path.join(run.ROOT, 'build', 'release'))
  parser.add_argument('--python', default=sys.executable)
  parser.add_argument('--quick', action='store_true', help='a tenth of the rows, one round')
  parser.add_argument('--json', help='a file for all figures')
  parser.add_argument('--case', default='', help='only cases whose text has this')
  parser.add_argument('--without', default='', help='sides to leave out, separated by commas')
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--seconds', type=float, default=8)
  parser.add_argument('--data', default=None, help='where keys and checkpoints go; a folder of a disk')
  args = run.ARGS = parser.parse_args()
  args.before, args.peer_huge_pages = None, False
  own = args.data is None
  args.data = args.data or tempfile.mkdtemp(prefix='frugal_checkpoint_')
  if args.quick:
    args.rounds, args.seconds = 1, 2
  sides = [s for s in ('none', 'frugal', 'stop', 'torch', 'dcp') if s not in args.without.split(',')]
  results = []
  try:
    for case in CASES:
      if args.case not in str(case):
        continue
      if args.quick:
        case = (case[0] // 10, *case[1:])
      # Each case has its processes: a table's memory is given back.
      workers = {s: run.Worker(s, command_of(s), dict(os.environ)) for s in sides}
      try:
        results.append(report(case, *measure(workers, *case)))
      finally:
        for worker in workers.values():
          worker.close()
      for side in sides:
        shutil.rmtree(os.path.join(args.data, side), ignore_errors=True)
  finally:
    if own:
      shutil.rmtree(args.data, ignore_errors=True)
  if args.json:
    with open(args.json, 'w', encoding='utf-8') as file:
      json.dump(results, file, indent=1)


def command_of(side):
  if side in ('torch', 'dcp'):
    return [run.ARGS.python, os.path.join(run.ROOT, 'bench', 'peer_dcp.py')]
  return [run.executable('bench_checkpoint', run.ARGS.build)]


if __name__ == '__main__':
  main()
