"""Runs the benchmarks: ./dev bench gather|train|flush|calls|queue|processes [--quick] [--json FILE] [--case TEXT].

With --before FOLDER, a build folder of another revision, only the library is measured, against that
revision's: three sides take turns, `now`, `before` and `before` a second time (class Before).

Each side of a comparison is a worker process that has its own tables and replies to commands on
stdin (bench/harness.h). Sides take turns (A B C A B C …), so that a bad minute of the machine hits
all of them. Medians are compared. This script needs only the standard library.
"""

import argparse
import array
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Throughput of a gather loop by the recipe of the field notes, in rows/s, dim 32, as measured when
# they were written: (distribution, threads). Their copy bandwidth was not recorded. NOTES_COPY is that
# of the same kind of machine in a quiet minute, by threads, in bytes/s.
NOTES_COPY = {1: 56e9, 2: 107e9}
NOTES_GATHER = {
    ('uniform', 1): 130e6, ('uniform', 2): 260e6,
    ('zipf0.99', 1): 161e6, ('zipf0.99', 2): 310e6,
}
UNITS = {
    'throughput': {'gather': 'rows/s', 'train': 'keys/s', 'flush': 'keys/s', 'queue': 'updates/s', 'calls': 'keys/s',
                   'processes': 'rows/s'},
    'stall': 'us', 'stall_mean': 'us', 'calls': 'us', 'calls_nothing_pending': 'us',
    'entry_time': 'us', 'apply_time': 'us', 'gate_wait': 'us', 'cpu_per_step': 'us',
    'lookup_time': 'us', 'again_time': 'us', 'push_time': 'us', 'prefetch_time': 'us', 'step_begin_time': 'us',
    'step_end_time': 'us', 'deferred_share': '1', 'next_step_share': '1',
    'throughput_without_fill': 'keys/s', 'gather': 'keys/s', 'sort': 'keys/s',
    'update': 'keys/s', 'fill': 'keys/s', 'enqueue': 'entries/s', 'adjust': 'entries/s',
    'dequeue': 'entries/s', 'device_time': 'us', 'latency_p50': 'us', 'latency_p99': 'us',
    'ratio': '1', 'idle_controller': '%', 'idle_trainer': '%', 'waiting_controller': '%',
    'waiting_trainer': '%',
}
STATE_FLOATS = {'sgd': lambda d: 0, 'rowwise_adagrad': lambda d: 1, 'adagrad': lambda d: d,
                'adam': lambda d: 2 * d}


class BenchError(Exception):
  pass


def say(text=''):
  print(text, flush=True)


def pairs(**values):
  return ' '.join(f'{k}={v}' for k, v in values.items())


class Worker:
  """A side's process."""

  REPLY_S = 900

  def __init__(self, name, command, env):
    self.name = name
    self.prepared = None
    self.log = open(os.path.join(ARGS.data, f'{name}.log'), 'w', encoding='utf-8')
    self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                    stderr=self.log, text=True, env=env)

  def send(self, line):
    try:
      self.process.stdin.write(line + '\n')
      self.process.stdin.flush()
    except BrokenPipeError as e:
      raise BenchError(f'{self.name}: the worker died; see {self.log.name}') from e

  def receive(self):
    watchdog = threading.Timer(self.REPLY_S, self.process.kill)
    watchdog.start()
    line = self.process.stdout.readline()
    watchdog.cancel()
    if not line:
      raise BenchError(f'{self.name}: the worker died; see {self.log.name}')
    answer = json.loads(line)
    if 'error' in answer:
      raise BenchError(f'{self.name}: {answer["error"]}')
    return answer

  def ask(self, line):
    self.send(line)
    return self.receive()

  def free(self):
    if self.prepared is not None:
      self.ask('free')
      self.prepared = None

  def close(self):
    try:
      self.process.stdin.close()
      self.process.wait(timeout=60)
    except (subprocess.TimeoutExpired, BrokenPipeError):
      self.process.kill()
    self.log.close()


class Workers:
  """Starts workers when they are first wanted."""

  def __init__(self):
    self.workers = {}

  def get(self, name):
    if name not in self.workers:
      bare, _, revision = name.partition('@')
      build = ARGS.before if revision else ARGS.build
      kind = bare.split('-')[0]
      env = dict(os.environ)
      if kind in ('torch', 'fbgemm'):
        if ARGS.peer_huge_pages:
          env['THP_MEM_ALLOC_ENABLE'] = '1'
        command = [ARGS.python, os.path.join(ROOT, 'bench', f'peer_{kind}.py')]
      else:
        exe = {'copy': 'bench_loop', 'loop': 'bench_loop', 'stages': 'bench_loop',
               'queue': 'bench_queue', 'processes': 'bench_processes', 'calls': 'bench_calls'}
        if kind == 'calls' and revision:  # the other revision may have none: this one's, with that library
          build, env['LD_LIBRARY_PATH'] = ARGS.build, ARGS.before
        command = [executable(exe.get(kind, 'bench_frugal'), build)]
      self.workers[name] = Worker(name, command, env)
    return self.workers[name]

  def free_but(self, names):
    for name, worker in self.workers.items():
      if name not in names:
        worker.free()

  def close(self):
    for worker in self.workers.values():
      worker.close()
    self.workers = {}


class Entry:
  """A side of a case: `report` False is an anchor that another group reports."""

  def __init__(self, case, side, worker, params, report=True, label=''):
    self.case, self.side, self.worker, self.params = case, side, worker, params
    self.report, self.label = report, label
    self.samples = {}

  def median(self, metric='throughput'):
    return statistics.median(self.samples[metric]) if self.samples.get(metric) else None


def executable(name, build=None):
  path = os.path.join(build or ARGS.build, 'bench', name)
  if not os.path.exists(path):
    raise BenchError(f'{path} is not built')
  return path


def controller(build):
  path = os.path.join(build, 'tools', 'controller', 'frugal-controller')
  if not os.path.exists(path):
    raise BenchError(f'{path} is not built')
  return path


def ids_file(dist, rows, count, seed=1):
  path = os.path.join(ARGS.data, f'ids-{dist}-{rows}-{count}-{seed}.bin')
  if not os.path.exists(path):
    subprocess.run([executable('bench_keys'), 'ids', dist, str(rows), str(count), str(seed),
                    path + '.part'], check=True)
    os.rename(path + '.part', path)
  return path


def batch_file(dist, rows, batch):
  # At least 40 different batches and 4 M keys, so that no cache holds a case.
  return ids_file(dist, rows, max(40 * batch, 64 * 65536))


def next_step_share(path, batch):
  out = subprocess.run([executable('bench_keys'), 'share', path, str(batch)], check=True,
                       capture_output=True, text=True).stdout
  return json.loads(out)


class Report:
  """Collects the objects of --json and the aims."""

  def __init__(self, bench):
    self.bench, self.objects, self.aims = bench, [], []

  def add(self, entry):
    for metric, samples in entry.samples.items():
      self.add_samples(entry.case, entry.side, metric, samples)

  def add_samples(self, case, side, metric, samples):
    unit = UNITS.get(metric)
    if unit is None:
      return
    if isinstance(unit, dict):
      unit = unit[self.bench]
    self.objects.append({
        'bench': self.bench, 'case': case, 'side': side, 'metric': metric, 'unit': unit,
        'median': statistics.median(samples), 'min': min(samples), 'max': max(samples),
        'n': len(samples)})

  def aim(self, name, value, limit, most=False):
    met = value <= limit if most else value >= limit
    self.aims.append((name, value, limit, met))
    say(f'    {name}: {value:.2f} (aim {"<=" if most else ">="} {limit:g}: '
        f'{"met" if met else "NOT met"})')

  def finish(self):
    if self.aims:
      say()
      met = sum(1 for a in self.aims if a[3])
      say(f'aims: {met} of {len(self.aims)} met')
    if ARGS.json:
      with open(ARGS.json, 'w', encoding='utf-8') as f:
        json.dump(self.objects, f, indent=1)
        f.write('\n')


class Before:
  """Compares the library with the one of --before, case by case.

  The other revision runs twice in each turn. Its ratio to itself is the resolution of the run: a case
  is slower only if its ratio is below 0.98 and below that.
  """

  # Sides that are not the library's.
  OTHERS = {'loop', 'stages', 'torch', 'fbgemm'}

  def __init__(self):
    self.rows = []

  def trio(self, entry):
    """The entry, and the two of the other revision."""
    params = ' '.join(f'controller={controller(ARGS.before)}' if p.startswith('controller=') else p
                      for p in entry.params.split())
    return [entry] + [Entry(entry.case, entry.side + side, entry.worker + side, params)
                      for side in ('@before', '@again')]

  def judge(self, entry, before, again):
    for metric in ('throughput', 'stall', 'lookup_time', 'again_time'):
      if metric not in entry.samples or (metric == 'lookup_time' and not entry.worker.startswith('calls')):
        continue
      if metric == 'stall' and min(before.samples[metric]) < 50:
        continue  # of less than 50 us the clock decides

      def ratio(side):
        pairs_ = zip(side.samples[metric], before.samples[metric])
        return statistics.median(x / y if metric == 'throughput' else y / max(x, 1e-3) for x, y in pairs_)

      now, itself = ratio(entry), ratio(again)
      slower = now < 0.98 and now < min(itself, 1 / itself)
      name = ' '.join(filter(None, (entry.case, entry.side, entry.label, metric)))
      self.rows.append((name, now, itself, slower))
      say(f'  {name}: now / before {now:.3f}, before / itself {itself:.3f}'
          f'{"  SLOWER" if slower else ""}')

  def finish(self):
    slower = [row for row in self.rows if row[3]]
    say(f'{len(self.rows)} cases compared with {ARGS.before}: {len(slower)} slower; median '
        f'{statistics.median(row[1] for row in self.rows):.3f}, lowest '
        f'{min(row[1] for row in self.rows):.3f}')
    for name, now, itself, _ in slower:
      say(f'  SLOWER {name}: {now:.3f} (before / itself {itself:.3f})')


def alternate(workers, entries, reps, seconds):
  """Runs the entries in turn, `reps` times each."""
  if not ARGS.before:
    return take_turns(workers, entries, reps, seconds)
  for e in entries:
    trio = COMPARED.trio(e)
    # The place of a process's memory changes its speed as long as it runs, so each round has new processes.
    for shift in range(ARGS.rounds):
      take_turns(workers, trio[shift % 3:] + trio[:shift % 3], ARGS.reps or reps, seconds)
      if ARGS.rounds > 1:
        workers.close()
    COMPARED.judge(*trio)


def take_turns(workers, entries, reps, seconds):
  workers.free_but({e.worker for e in entries})
  fresh = {}
  for e in entries:  # each worker's first entry, concurrently: no clock runs yet
    worker = workers.get(e.worker)
    if e.worker not in fresh and worker.prepared != e.params:
      worker.send('prepare ' + e.params)
      worker.prepared = e.params
      fresh[e.worker] = worker
  for worker in fresh.values():
    worker.receive()
  for rep in range(reps):
    for i in range(len(entries)):
      e = entries[(rep + i) % len(entries)] if ARGS.before else entries[i]
      worker = workers.get(e.worker)
      if worker.prepared != e.params:
        worker.ask('prepare ' + e.params)
        worker.prepared = e.params
      for metric, value in worker.ask(f'run seconds={seconds}').items():
        e.samples.setdefault(metric, []).append(value)


def million(x):
  return f'{x / 1e6:8.2f}'


def line(entry, unit, extra=''):
  samples = entry.samples['throughput']
  name = entry.side + (f' {entry.label}' if entry.label else '')
  say(f'  {name:28s}{million(statistics.median(samples))} M {unit}   '
      f'[{min(samples) / 1e6:.2f} .. {max(samples) / 1e6:.2f}]{extra}')


# -------------------------------------------------------------------------------------------
# Machine
# -------------------------------------------------------------------------------------------


def read(path, default=''):
  try:
    with open(path, encoding='utf-8') as f:
      return f.read().strip()
  except OSError:
    return default


def memory_kib(field):
  for row in read('/proc/meminfo').splitlines():
    if row.startswith(field + ':'):
      return int(row.split()[1])
  return 0


def copy_bandwidth(workers, threads):
  return workers.get('copy').ask(f'copy threads={threads}')['bandwidth']


def machine(workers, backing=None):
  model = platform.machine()
  for row in read('/proc/cpuinfo').splitlines():
    if row.startswith('model name'):
      model = row.split(':', 1)[1].strip()
      break
  thp = '/sys/kernel/mm/transparent_hugepage/'
  copy = {t: copy_bandwidth(workers, t) for t in (1, 2)}
  say(f'machine: {model}, {len(os.sched_getaffinity(0))} cores, '
      f'{memory_kib("MemTotal") / 2**20:.0f} GiB')
  say(f'pages: {os.sysconf("SC_PAGE_SIZE")} bytes, huge {memory_kib("Hugepagesize")} KiB; '
      f'transparent: {read(thp + "enabled")}; shared memory: {read(thp + "shmem_enabled")}')
  if backing is None:
    peers = 'with' if ARGS.peer_huge_pages else 'as installed, without'
    backing = ('private memory with transparent huge pages for frugal, loop and stages; '
               f'peers {peers} huge pages')
  say(f'backing: {backing}')
  say(f'copy bandwidth (read + written): {copy[1] / 1e9:.1f} GB/s on 1 thread, '
      f'{copy[2] / 1e9:.1f} on 2; load {os.getloadavg()[0]:.2f}')
  say()


# -------------------------------------------------------------------------------------------
# gather
# -------------------------------------------------------------------------------------------


def wanted(case):
  return all(word in case.split() or word in case for word in ARGS.case.split())


def bench_gather(workers, report):
  machine(workers)
  reps, seconds = (5, 0.15) if ARGS.quick else (9, 0.4)
  shapes = [(10_000_000, 32)] if ARGS.quick else [(10_000_000, 32), (4_000_000, 128)]
  for rows, dim in shapes:
    for threads in (1,) if ARGS.brief else (1, 2):
      for dist in ('uniform', 'zipf0.99'):
        keys = batch_file(dist, rows, 65536)
        case = pairs(dist=dist, dim=dim, batch=65536, keys='dense', trainers=threads,
                     threads=threads)
        if not wanted(case):
          continue
        params = pairs(bench='gather', rows=rows, dim=dim, batch=65536, trainers=threads,
                       threads=threads, keys_file=keys)
        entries = []
        for side in ('frugal', 'loop', 'torch', 'fbgemm'):
          entries.append(Entry(case, side, side, f'side={side} ' + params))
        if threads == 2 and not ARGS.quick:
          other = case.replace('trainers=2', 'trainers=1')
          entries.insert(1, Entry(other, 'frugal', 'frugal-1', params.replace(
              'trainers=2', 'trainers=1'), label='trainers=1'))
        entries = [e for e in entries if e.side not in ARGS.without]
        say(f'gather  {case} rows={rows}')
        copy = copy_bandwidth(workers, threads)
        alternate(workers, entries, reps, seconds)
        copy = (copy + copy_bandwidth(workers, threads)) / 2
        by = {e.side: e for e in reversed(entries)}
        for e in entries:
          report.add(e)
          line(e, 'rows/s')
        loop = by.get('loop')
        if loop and 'frugal' in by:
          ratio = by['frugal'].median() / loop.median()
          report.aim('frugal / loop', ratio, 0.95)
        if loop:
          # A row is read and written once; its key is read.
          moved = loop.median() * (2 * 4 * dim + 8) / copy
          say(f'    the loop moves {moved:.2f} of the copy bandwidth, '
              f'{copy / 1e9:.1f} GB/s now')
          notes = NOTES_GATHER.get((dist, threads)) if dim == 32 else None
          if notes:
            scale = copy / NOTES_COPY[threads]
            report.aim(f"loop / the notes' figure x {scale:.2f} (copy bandwidth)",
                       loop.median() / (notes * scale), 0.9)
        for peer in ('torch', 'fbgemm'):
          if peer in by and 'frugal' in by:
            say(f'    frugal / {peer}: {by["frugal"].median() / by[peer].median():.2f}')


# -------------------------------------------------------------------------------------------
# train
# -------------------------------------------------------------------------------------------

PEERS = {'sgd': ('torch', 'fbgemm'), 'rowwise_adagrad': ('fbgemm',),
         'adagrad': ('torch', 'fbgemm'), 'adam': ('torch',)}
PEER_AIMS = {('sgd', 'torch'): 3, ('adagrad', 'torch'): 8, ('adam', 'torch'): 8,
             ('rowwise_adagrad', 'fbgemm'): 4, ('adagrad', 'fbgemm'): 10}
WINDOW = 10


def table_rows(opt, dim):
  # Adam with dim 128 at 4 M rows would be 6 GB for each side.
  return 10_000_000 if dim == 32 else 2_000_000 if opt == 'adam' else 4_000_000


def table_bytes(opt, dim, hashed):
  floats = dim + STATE_FLOATS[opt](dim)
  return table_rows(opt, dim) * (floats * 4 + (24 if hashed else 4)) + (300 << 20)


CHECKED_ROWS = 60_000


def compare_results(workers, opt, dim, sides):
  """Trains a small table on each side and compares the rows."""
  rows, batch, steps = CHECKED_ROWS, 8192, 6
  ok = True
  for dist in ('uniform', 'zipf0.99'):
    keys = ids_file(dist, rows, batch * steps, seed=3)
    grads = os.path.join(ARGS.data, f'grads-{dim}.bin')
    if not os.path.exists(grads):
      subprocess.run([executable('bench_keys'), 'grads', str(batch * steps * dim), '5', grads],
                     check=True)
    base = pairs(opt=opt, rows=rows, dim=dim, batch=batch, steps=steps, init=0.01,
                 keys_file=keys, grads_file=grads)
    results = {}
    for name, worker, extra in sides:
      out = os.path.join(ARGS.data, f'check-{name.replace(" ", "-")}.bin')
      workers.get(worker).ask(f'check {base} out_file={out} {extra}')
      workers.get(worker).prepared = None
      with open(out, 'rb') as f:
        results[name] = f.read()
    reference_name = 'frugal' if 'frugal' in results else 'stages'
    reference = results.get(reference_name)
    if reference is None:
      continue
    for name, result in results.items():
      if name == reference_name:
        continue
      if name in ('torch', 'fbgemm'):
        apart = far_apart(reference, result)
        # Sums are taken in another order there; where terms cancel, a sign can differ.
        good = apart <= 2e-5
        how = f'within 1e-4 but for {apart:.1e} of the elements'
      else:
        good = reference == result
        how = 'the same bits' if good else 'OTHER BITS'
      ok &= good
      say(f'  results {dist}: {reference_name} and {name}: {how}{"" if good else "  NOT equal"}')
  return ok


def far_apart(left, right):
  a, b = array.array('f'), array.array('f')
  a.frombytes(left)
  b.frombytes(right)
  if len(a) != len(b):
    return 1.0
  return sum(1 for x, y in zip(a, b) if not abs(x - y) <= 1e-6 + 1e-4 * abs(x)) / len(a)


def train_groups(opt, dim, budget):
  """Lists of variants that share a run; each but the first repeats the base as an anchor."""
  engine = table_bytes(opt, dim, False)
  groups = [[('', 'frugal', {}), ('grads=lent', 'frugal', {'grads': 'lent'})]]
  used = engine
  for side in ('stages',) + PEERS[opt]:
    groups[0].append((side, side, None))
    used += engine
  used = {0: used}
  for tag, worker, change, size in (
      ('flush=deferred', 'frugal-deferred', {'flush': 'deferred'}, engine),
      ('flush=at_once', 'frugal-at_once', {'flush': 'at_once'}, engine),
      ('trainers=2', 'frugal-trainers', {'trainers': 2}, engine),
      ('keys=hashed', 'frugal-hashed', {'keys': 'hashed'}, table_bytes(opt, dim, True))):
    if ARGS.quick and tag in ('trainers=2', 'keys=hashed'):
      continue
    at = next((i for i in range(len(groups)) if used[i] + size <= budget), None)
    if tag == 'flush=at_once' and len(groups) > 1:
      at = len(groups) - 1 if used[len(groups) - 1] + size <= budget else at  # with deferred
    if at is None:
      groups.append([('', 'frugal', {})])
      at = len(groups) - 1
      used[at] = engine
    groups[at].append((tag, worker, change))
    used[at] += size
  return groups


def bench_train(workers, report):
  machine(workers)
  reps, seconds = (3, 0.25) if ARGS.quick else (5, 0.4)
  opts = ('rowwise_adagrad',)
  if not ARGS.brief:
    opts += ('adagrad',)
  if not ARGS.quick:
    opts += ('sgd', 'adam')
  dims = (32,) if ARGS.quick else (32, 128)
  sizes = (65536,) if ARGS.quick else (65536, 4096, 262144)
  budget = memory_kib('MemAvailable') * 1024 * 0.8
  bases = {}
  for opt in opts:
    for dim in dims:
      points = []
      for batch in sizes:
        for dist in ('uniform', 'zipf0.99'):
          case = pairs(opt=opt, dist=dist, dim=dim, batch=batch, keys='dense', trainers=1,
                       threads=2)
          if wanted(case):
            points.append((case, dist, batch))
      if not points:
        continue
      workers.free_but(())
      sides = [('frugal', 'frugal', ''), ('stages', 'stages', '')]
      sides += [(peer, peer, '') for peer in PEERS[opt]]
      if not ARGS.quick:
        sides += [('frugal deferred', 'frugal', 'flush=deferred'),
                  ('frugal hashed', 'frugal', 'keys=hashed')]
      sides = [s for s in sides if s[1] not in ARGS.without]
      say(f'train  opt={opt} dim={dim}')
      if not compare_results(workers, opt, dim, sides):
        raise BenchError('the sides disagree: their speed means nothing')
      for number, group in enumerate(train_groups(opt, dim, budget)):
        for case, dist, batch in points:
          run_train_point(workers, report, bases, opt, dim, case, dist, batch, group,
                          number == 0, reps, seconds)


def run_train_point(workers, report, bases, opt, dim, case, dist, batch, group, first, reps,
                    seconds):
  rows = table_rows(opt, dim)
  keys = batch_file(dist, rows, batch)
  base = {'bench': 'train', 'opt': opt, 'rows': rows, 'dim': dim, 'batch': batch,
          'keys': 'dense', 'keys_file': keys, 'window': WINDOW, 'trainers': 1, 'threads': 2}
  entries = []
  for tag, worker, change in group:
    if worker.split('-')[0] in ARGS.without:
      continue
    if change is None:
      entries.append(Entry(case, worker, worker, pairs(side=worker, **base)))
      continue
    name, _, value = tag.partition('=')
    if name in ('trainers', 'keys'):
      this = ' '.join(f'{name}={value}' if w.startswith(name + '=') else w for w in case.split())
    else:
      this = f'{case} {tag}'.strip()
    entries.append(Entry(this, 'frugal', worker, pairs(**{**base, **change}),
                         report=first or tag != '', label=tag))
  if not entries:
    return
  say(f'train  {case} rows={rows}')
  alternate(workers, entries, reps, seconds)
  by = {}
  for e in entries:
    extra = ''
    if e.side == 'frugal':
      extra = f'  deferred {e.median("deferred_share"):.0%}'
      by[e.label] = e
    else:
      by[e.side] = e
    if e.side == 'stages':
      extra = ('  gather {:.0f} sort {:.0f} update {:.0f} fill {:.0f}'.format(
          *(e.median(m) / 1e6 for m in ('gather', 'sort', 'update', 'fill'))))
    if e.report:
      report.add(e)
    line(e, 'keys/s', extra)

  judged = dim == 32 and batch == 65536

  def ratio(name, left, right, least):
    if by.get(left) is None or by.get(right) is None:
      return
    value = by[left].median() / by[right].median()
    if judged and least is not None:
      report.aim(name, value, least)
    else:
      say(f'    {name}: {value:.2f}')

  for peer in PEERS[opt]:
    ratio(f'frugal / {peer}', '', peer, PEER_AIMS.get((opt, peer)))
  ratio('frugal / stages', '', 'stages', 0.75)
  ratio('frugal grads=lent / stages', 'grads=lent', 'stages', 0.75)
  ratio('lent / own', 'grads=lent', '', None)
  ratio('hashed / dense', 'keys=hashed', '', 0.6)
  ratio('deferred / at once', 'flush=deferred', 'flush=at_once', 0.8)
  ratio('2 trainers / 1', 'trainers=2', '', None)
  bases[case] = by.get('')


# -------------------------------------------------------------------------------------------
# flush
# -------------------------------------------------------------------------------------------


def bench_flush(workers, report):
  machine(workers)
  reps, seconds = (1 if ARGS.brief else 2, 0.2) if ARGS.quick else (5, 0.3)
  rows, dim, opt = 10_000_000, 32, 'rowwise_adagrad'
  sizes = (65536,) if ARGS.quick else (65536, 16384, 4096, 1024)
  dists = ('uniform', 'zipf0.99') if ARGS.quick else ('uniform', 'zipf0.9', 'zipf0.99')
  factors = (3,) if ARGS.brief else (3, 1) if ARGS.quick else (3, 1, 0)
  modes = (('frugal', 'deferred'), ('write_through', 'write_through'),
           ('tree_heap', 'tree_heap'))
  for batch in sizes:
    for dist in dists:
      base_case = pairs(opt=opt, dist=dist, dim=dim, batch=batch, keys='dense', trainers=1,
                        threads=2)
      if not any(wanted(f'{base_case} device_time={f}') for f in factors):
        continue
      keys = batch_file(dist, rows, batch)
      share = next_step_share(keys, batch)
      base = {'bench': 'flush', 'opt': opt, 'rows': rows, 'dim': dim, 'batch': batch,
              'keys': 'dense', 'keys_file': keys, 'window': WINDOW, 'trainers': 1, 'threads': 2}
      worker = workers.get('frugal')
      worker.prepared = None
      worker.ask('prepare ' + pairs(**base, flush='deferred'))
      work_ns = worker.ask('cpu_work')['cpu_ns']
      say(f'flush  {base_case}')
      say(f'  CPU work of a step {work_ns / 1e3:.0f} us; {share["distinct_rows"]:.0f} distinct '
          f'rows, {share["next_step_share"]:.1%} of them read again in the very next step')
      for factor in factors:
        case = f'{base_case} device_time={factor}'
        if not wanted(case):
          continue
        wait_ns = int(work_ns * factor)
        entries = [Entry(case, side, 'frugal' if side == 'frugal' else f'frugal-{side}',
                         pairs(**base, flush=mode, wait_ns=wait_ns,
                               settle_ns=int(work_ns))) for side, mode in modes]
        alternate(workers, entries, reps, seconds)
        report.add_samples(case, 'frugal', 'device_time', [wait_ns / 1e3])
        report.add_samples(case, 'frugal', 'next_step_share', [share['next_step_share']])
        say(f'  device time {factor} x ({wait_ns / 1e3:.0f} us a step)')
        for e in entries:
          report.add(e)
          say(f'    {e.side:16s} stall {e.median("stall"):9.1f} us '
              f'[{min(e.samples["stall"]):.1f} .. {max(e.samples["stall"]):.1f}]  '
              f'mean {e.median("stall_mean"):9.1f} us  g-entries {e.median("entry_time"):8.1f} us'
              f'  {e.median() / 1e6:7.2f} M keys/s')
        stall = {e.side: e.median('stall') for e in entries}
        # Below a microsecond the clock decides; below zero there is noise of that size.
        ours = max(abs(stall['frugal']), 1.0)
        for side in ('write_through', 'tree_heap'):
          ratio = stall[side] / ours
          name = f'stall of {side} / frugal'
          if side == 'write_through' and factor >= 3 and dist != 'zipf0.9':
            report.aim(name, ratio, 50 if dist == 'uniform' else 8)
          else:
            say(f'    {name}: {ratio:.2f}')


# -------------------------------------------------------------------------------------------
# queue
# -------------------------------------------------------------------------------------------


def bench_queue(workers, report):
  machine(workers)
  reps = 5 if ARGS.quick else 9
  for threads in (1, 2):
    case = pairs(entries=1_000_000, threads=threads)
    if not wanted(case):
      continue
    entries = [Entry(case, side, f'queue-{side}', f'side={side} {case}')
               for side in ('frugal', 'tree_heap')]
    say(f'queue  {case}')
    alternate(workers, entries, reps, 0)
    for e in entries:
      report.add(e)
      line(e, 'updates/s', '  enqueue {:.0f} adjust {:.0f} dequeue {:.0f}'.format(
          *(e.median(m) / 1e6 for m in ('enqueue', 'adjust', 'dequeue'))))
    ours = entries[0].median()
    if threads == 2:
      report.aim('M updates/s on 2 threads', ours / 1e6, 20)
    say(f'    frugal / tree_heap: {ours / entries[1].median():.2f}')


# -------------------------------------------------------------------------------------------
# calls
# -------------------------------------------------------------------------------------------


def bench_calls(workers, report):
  """Steps of few keys, and of many tables: the cost of a call without that of its rows."""
  machine(workers)
  a_key = {}
  for tables, backwards, again in ((1, 0, 0), (1, 0, 20), (10, 0, 0), (1000, 0, 0), (1000, 1, 0)):
    case = (pairs(tables=tables, keys=64, dim=32, threads=1) + (' backwards=1' if backwards else '') +
            (f' again={again}' if again else ''))
    if not wanted(case):
      continue
    entry = Entry(case, 'frugal', 'calls', f'rows=10000 {case}')
    alternate(workers, [entry], 5 if ARGS.quick else 15, 0.3)
    report.add(entry)
    if again:
      say(f'calls  {case}: a lookup {entry.median("again_time"):.3f} us')
      continue
    a_key[tables, backwards] = 1e9 / entry.median()
    say(f'calls  {case}: {a_key[tables, backwards]:.0f} ns a key, '
        f'lookups of a step {entry.median("lookup_time"):.2f} us')
  if {(10, 0), (1000, 0)} <= a_key.keys():
    report.aim('a key of 1,000 tables / of 10', a_key[1000, 0] / a_key[10, 0], 1.3, most=True)
  if {(1000, 0), (1000, 1)} <= a_key.keys():
    report.aim('gradients backwards / in order', a_key[1000, 1] / a_key[1000, 0], 1.1, most=True)


# -------------------------------------------------------------------------------------------
# processes
# -------------------------------------------------------------------------------------------


def bench_processes(workers, report):
  machine(workers, 'shared memory on both sides')
  reps, seconds = (3 if ARGS.brief else 7, 0.3) if ARGS.quick else (30, 0.4)
  rows, dim = 10_000_000, 32
  sides = [side for side in ('frugal', 'threads') if side not in ARGS.without]
  names = {side: f'processes-{side}' for side in sides}
  checked = set()
  # Where each processor has a rank, flush threads share the processors with trainers and request loops, which apply
  # updates, too.
  shapes = [(1, 1), (2, 1)] if ARGS.quick else [(1, 1), (2, 1), (2, 0), (4, 1), (4, 0)]
  for opt in ('rowwise_adagrad',) if ARGS.quick else ('rowwise_adagrad', 'sgd'):
    for batch in (65536,) if ARGS.quick else (65536, 4096):
      for ranks, flush_threads in shapes:
        for dist in ('uniform',) if ARGS.brief else ('uniform', 'zipf0.99'):
          case = pairs(opt=opt, dist=dist, dim=dim, batch=batch, keys='dense', ranks=ranks,
                       flush_threads=flush_threads)
          if not wanted(case):
            continue
          base = {'opt': opt, 'dim': dim, 'ranks': ranks, 'window': WINDOW,
                  'flush_threads': flush_threads, 'controller': controller(ARGS.build)}
          if (opt, ranks, flush_threads) not in checked:
            same_processes(workers, names, base)
            checked.add((opt, ranks, flush_threads))
          params = pairs(**base, rows=rows, batch=batch, keys_file=batch_file(dist, rows, batch))
          entries = [Entry(case, side, names[side], f'side={side} {params}') for side in sides]
          say(f'processes  {case} rows={rows} load={os.getloadavg()[0]:.2f}')
          alternate(workers, entries, reps, seconds)
          for e in entries:
            line(e, 'rows/s', '  step p50 {:.0f} us p99 {:.0f}, CPU {:.0f}  deferred {:.0%}'.format(
                *(e.median(m) for m in ('latency_p50', 'latency_p99', 'cpu_per_step',
                                        'deferred_share'))))
          if len(entries) == 2:
            both = zip(*(e.samples['throughput'] for e in entries))
            ratios = [ours / theirs for ours, theirs in both]
            entries[0].samples['ratio'] = ratios
            name = f'frugal / threads, median of {len(ratios)} pairs'
            if batch == 65536 and ranks <= 2:
              report.aim(name, statistics.median(ratios), 0.95)
            else:
              say(f'    {name}: {statistics.median(ratios):.2f}')
          for e in entries:
            report.add(e)
  case = pairs(idle='yes', dim=dim, batch=65536, keys='dense', ranks=2)
  if 'frugal' in sides and wanted(case):
    params = pairs(opt='rowwise_adagrad', dim=dim, ranks=2, window=WINDOW, controller=controller(ARGS.build),
                   rows=rows, batch=65536, keys_file=batch_file('uniform', rows, 65536))
    workers.free_but({names['frugal']})
    worker = workers.get(names['frugal'])
    worker.ask(f'prepare side=frugal {params}')
    worker.prepared = params
    say(f'processes  {case}')
    for metric, value in worker.ask(f'idle seconds={2 if ARGS.quick else 10}').items():
      report.add_samples(case, 'frugal', metric, [value])
      report.aim(f'{metric.replace("_", ", ")}: % of a core', value, 0.5, most=True)


def same_processes(workers, names, base):
  """Trains a small table on each side; they must come to the same bits."""
  batch, steps = 8192, 12
  keys = ids_file('zipf0.99', CHECKED_ROWS, batch * steps, seed=3)
  results = set()
  for side, name in names.items():
    out = os.path.join(ARGS.data, f'check-{name}.bin')
    workers.get(name).ask(f'check side={side} ' + pairs(
        **base, rows=CHECKED_ROWS, batch=batch, steps=steps, keys_file=keys, out_file=out))
    workers.get(name).prepared = None
    with open(out, 'rb') as f:
      results.add(f.read())
  if len(results) > 1:
    raise BenchError('the sides come to other bits: their speed means nothing')
  say(f'  results of {" and ".join(names)}, {base["ranks"]} ranks, {base["opt"]}: the same bits')


BENCHES = {'gather': bench_gather, 'train': bench_train, 'flush': bench_flush, 'calls': bench_calls,
           'queue': bench_queue, 'processes': bench_processes}


def main():
  parser = argparse.ArgumentParser(prog='dev bench')
  parser.add_argument('bench', choices=list(BENCHES) + ['all'], nargs='?', default='all')
  parser.add_argument('--quick', action='store_true', help='few cases, within 60 s')
  parser.add_argument('--json', metavar='FILE', help='write all figures there')
  parser.add_argument('--case', default='', metavar='TEXT',
                      help="only cases with these words, as in 'opt=adam dim=32'")
  parser.add_argument('--without', default='', metavar='SIDES',
                      help='sides to leave out, as in torch,fbgemm')
  parser.add_argument('--peer-huge-pages', action='store_true',
                      help="give torch's and FBGEMM's memory huge pages, too")
  parser.add_argument('--build', default=os.path.join(ROOT, 'build', 'release'))
  parser.add_argument('--python', default=sys.executable,
                      help='the interpreter that has torch and FBGEMM')
  parser.add_argument('--before', metavar='FOLDER',
                      help='compare the library with that of another build folder, and nothing else')
  parser.add_argument('--reps', type=int, help='repetitions of each case')
  parser.add_argument('--rounds', type=int, default=1, metavar='N',
                      help='with --before: repeats all of a case N times, each time with new processes')
  args = parser.parse_args()
  # All benchmarks together get the minute that each has alone.
  args.brief = args.quick and args.bench == 'all'
  args.without = set(filter(None, args.without.split(',')))
  if args.before:
    args.before = os.path.abspath(args.before)
    args.without |= Before.OTHERS
  args.data = os.path.join(args.build, 'bench-data')
  os.makedirs(args.data, exist_ok=True)
  if args.json:
    args.json = os.path.abspath(args.json)
  return args


def run():
  started = time.monotonic()
  names = list(BENCHES) if ARGS.bench == 'all' else [ARGS.bench]
  objects = []
  for name in names:
    workers, report = Workers(), Report(name)
    try:
      BENCHES[name](workers, report)
    finally:
      workers.close()
      objects += report.objects
      report.objects = objects
      report.finish()
  say(f'{time.monotonic() - started:.0f} s')


if __name__ == '__main__':
  ARGS = main()
  COMPARED = Before()
  try:
    run()
    if ARGS.before:
      COMPARED.finish()
  except BenchError as error:
    sys.exit(f'dev bench: {error}')
  except KeyboardInterrupt:
    sys.exit('dev bench: interrupted')
