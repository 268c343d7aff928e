"""Makes the n-th call for memory, a map, a descriptor, a thread or I/O fail in a job, for each n.

The job (see failing.h) runs in a process of its own for each point. An undisturbed run counts the points. Then the n-th
call fails: in one run only that call, in another run all later ones, too. The job must come to its end, with the digest
of the undisturbed run. Runs whose engine became unhealthy for good are counted. A crash, a hang (longer than
--watchdog seconds), a status that the header does not name, and wrong bits are red.

    tests/failing/sweep.py --preload build/release/tests/failing/libfrugal_failing.so --all -- PROGRAM ARGUMENTS
    tests/failing/sweep.py ... --sample 300 --seed 7 --variant '--at-once' --variant '--threads 0' -- PROGRAM

Exit status: 0 if nothing was red, and of all points at most --most-unhealthy per cent were unhealthy.
"""

import argparse
import collections
import concurrent.futures
import itertools
import json
import mmap
import os
import random
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import time

KINDS = ['memory', 'map', 'descriptor', 'thread', 'io']
STACK = 8192
BYTES = 8 * (len(KINDS) + 2) + STACK
GOOD = ['ok', 'told', 'unhealthy', 'not reached']

Point = collections.namedtuple('Point', 'variant kind ever at')
Result = collections.namedtuple('Result', 'outcome text points stack')


def report_of(file):
  with mmap.mmap(file.fileno(), BYTES) as m:
    numbers = struct.unpack_from(f'={len(KINDS) + 2}Q', m, 0)
    stack = bytes(m[BYTES - STACK:]).split(b'\0')[0].decode()
  return dict(zip(KINDS, numbers)), numbers[len(KINDS)], stack


def names_of(stack):
  """The frames of a stack, by name."""
  names = []
  for line in stack.splitlines():
    path, offset = line.rsplit(' ', 1)
    told = subprocess.run(['addr2line', '-Cfpse', path, offset], capture_output=True, text=True, check=False)
    names.append(told.stdout.split('\n')[0].strip()[:150] or line)
  return names


def sample_of(points, most, rng):
  """Draws `most` points: half of the most frequent kind, the others equally from the other kinds, as far as they go."""
  groups = collections.defaultdict(list)
  for point in rng.sample(points, len(points)):
    groups[point.kind].append(point)
  taken = []
  *few, many = sorted(groups.values(), key=len)
  for left, group in zip(range(len(few), 0, -1), few):
    taken += group[:(most // 2 - len(taken)) // left]
  return taken + many[:most - len(taken)]


class Sweep:

  def __init__(self, options):
    self.options = options
    self.digests = {}

  def command(self, variant):
    return self.options.command + shlex.split(variant)

  def run(self, point, trace=False):
    """Runs the job with a failing point (at 0: none). Returns how it ended."""
    o = self.options
    with tempfile.NamedTemporaryFile(prefix='frugal-failing-') as file:
      file.write(bytes(BYTES))
      file.flush()
      env = dict(os.environ, LD_PRELOAD=o.preload, FAILING_REPORT=file.name, FAILING_KIND=point.kind,
                 FAILING_AT=str(point.at))
      for name, value in (('EVER', point.ever), ('PROGRAM', o.program), ('WHOLE', o.whole), ('TRACE', trace)):
        if value:
          env[f'FAILING_{name}'] = str(value) if isinstance(value, str) else '1'
      child = subprocess.Popen(self.command(point.variant), env=env, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
      try:
        out, err = child.communicate(timeout=o.watchdog)
        hung = ''
      except subprocess.TimeoutExpired:
        hung = self.where(child.pid) if trace or o.explain else 'longer than the watchdog'
      finally:
        try:
          os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
          pass
      if hung:
        child.communicate()
      points, fired, stack = report_of(file)
    if hung:
      return Result('hang', hung, points, stack)
    lines = out.decode(errors='replace').strip().splitlines()
    text = lines[-1] if lines else ''
    status = child.returncode
    if status < 0 or not text:
      name = signal.Signals(-status).name if status < 0 else f'exit {status}'
      return Result('crash', f'{name} {err.decode(errors="replace").strip()[-300:]}', points, stack)
    if status == 3:
      return Result('unhealthy', text, points, stack)
    if status != 0:
      return Result('wrong status', text, points, stack)
    words = text.split()
    if point.at and words[1] != self.digests[point.variant]:
      return Result('wrong bits', text, points, stack)
    if point.at and not fired:
      return Result('not reached', text, points, stack)
    return Result('told' if 'told' in words and words[words.index('told') + 1] != '0' else 'ok', text, points, stack)

  @staticmethod
  def where(pid):
    """Where a process hangs, if there is a debugger."""
    try:
      told = subprocess.run(['gdb', '-p', str(pid), '-batch', '-ex', 'thread apply all bt 12'], capture_output=True,
                            text=True, timeout=60, check=False)
      return told.stdout[-6000:]
    except (OSError, subprocess.TimeoutExpired):
      return 'longer than the watchdog'

  def undisturbed(self, variant):
    counts = collections.Counter()
    for _ in range(2):  # counts vary a little, because of threads: the larger one is used
      result = self.run(Point(variant, KINDS[0], False, 0))
      if result.outcome != 'ok':
        sys.exit(f'sweep: undisturbed, "{variant}": {result.outcome}: {result.text}')
      digest = result.text.split()[1]
      if self.digests.setdefault(variant, digest) != digest:
        sys.exit(f'sweep: undisturbed, "{variant}": two runs differ')
      for kind, n in result.points.items():
        counts[kind] = max(counts[kind], n)
    return counts


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--preload', required=True, help='libfrugal_failing.so')
  parser.add_argument('--program', help='only in processes of this name')
  parser.add_argument('--whole', action='store_true', help='all threads of the process, from its start on')
  parser.add_argument('--kinds', default=','.join(KINDS))
  parser.add_argument('--variant', action='append', help='more arguments of the job; may be repeated')
  parser.add_argument('--all', action='store_true', help='every point')
  parser.add_argument('--sample', type=int, help='so many points')
  parser.add_argument('--seed', type=int, help='of the sample; else a new one')
  parser.add_argument('--only', choices=['once', 'ever'])
  parser.add_argument('--point', help='one point: KIND:once|ever:N')
  parser.add_argument('--most-unhealthy', type=float, default=1.5, help='per cent; a sample may have more by chance')
  parser.add_argument('--least', type=int, default=0, help='points that there have to be')
  parser.add_argument('--watchdog', type=float, default=120, help='seconds; a job waits for some time-outs of 8 s')
  # Most of the time a job waits for time-outs.
  parser.add_argument('--jobs', type=int, default=3 * len(os.sched_getaffinity(0)))
  parser.add_argument('--explain', action='store_true', help='unhealthy and red points again, with their stacks')
  parser.add_argument('--json', help='file for the outcomes')
  parser.add_argument('command', nargs='+')
  options = parser.parse_args()
  options.preload = os.path.abspath(options.preload)
  sweep = Sweep(options)
  begun = time.monotonic()
  variants = options.variant or ['']
  kinds = options.kinds.split(',')
  points = []
  for variant in variants:
    counts = sweep.undisturbed(variant)
    print(f'{variant or "(no arguments)"}: ' + ', '.join(f'{counts[k]} {k}' for k in kinds), flush=True)
    for kind, ever in itertools.product(kinds, (False, True)):
      if options.only in (None, 'ever' if ever else 'once'):
        points += [Point(variant, kind, ever, n + 1) for n in range(counts[kind])]
  there = len(points)
  if options.point:
    kind, when, at = options.point.split(':')
    points = [Point(v, kind, when == 'ever', int(at)) for v in variants]
    options.explain = True
  elif not options.all:
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(4), 'little')
    points = sample_of(points, options.sample or 100, random.Random(seed))
    print(f'seed {seed}: {len(points)} of {there} points', flush=True)
  table = collections.defaultdict(collections.Counter)
  bad = []
  with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
    for point, result in zip(points, pool.map(sweep.run, points)):
      table[(point.kind, 'for ever' if point.ever else 'once')][result.outcome] += 1
      if result.outcome not in ('ok', 'told', 'not reached'):
        bad.append((point, result))
      if result.outcome not in GOOD:
        print(f'RED {result.outcome}: {point}: {result.text}', flush=True)
  seen = sorted({outcome for row in table.values() for outcome in row}, key=lambda o: (o not in GOOD, o))
  print(f'{"":24}' + ''.join(f'{o:>14}' for o in ['points'] + seen))
  total = collections.Counter()
  for (kind, when), row in table.items():
    total.update(row)
    print(f'{kind + ", " + when:24}{sum(row.values()):14}' + ''.join(f'{row[o]:14}' for o in seen))
  print(f'{"all":24}{sum(total.values()):14}' + ''.join(f'{total[o]:14}' for o in seen))
  print(f'{time.monotonic() - begun:.0f} s')
  if options.explain:
    stacks = collections.Counter()
    for point, result in bad:
      traced = sweep.run(point, trace=True)
      frames = names_of(traced.stack)
      short = ' < '.join(f.split('(')[0].split(' at ')[0] for f in frames[:14])
      stacks[f'{result.outcome} ({traced.outcome}) {short}\n      {traced.text}'] += 1
    for stack, n in stacks.most_common():
      print(f'{n:5} {stack}')
  if options.json:
    with open(options.json, 'w', encoding='utf-8') as f:
      json.dump([list(p) + [r.outcome, r.text] for p, r in bad], f, indent=1)
  if there < options.least:
    sys.exit(f'sweep: only {there} points, not {options.least}')
  unhealthy = 100 * total['unhealthy'] / max(1, sum(total.values()))
  if any(o not in GOOD for o in total):
    sys.exit(1)
  # By chance a sample may have more: by up to four standard deviations.
  most = options.most_unhealthy * sum(total.values()) / 100
  if total['unhealthy'] > most + (0 if options.all else 4 * most ** 0.5):
    sys.exit(f'sweep: {unhealthy:.1f} % are unhealthy for good, more than {options.most_unhealthy} %')


if __name__ == '__main__':
  main()
