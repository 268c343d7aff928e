"""Runs the suites of ./dev test concurrently, and prints the minutes that are left.

    tests/run.py [--ci | --all] [--only SUITE]... [--no-skips] [--json FILE]

./dev test is the entrance: it first installs what the suites need. Without a tier it runs the suites of `base`. Each
suite is a build, a run of ctest, or a program whose last line is "N passed, N failed, N skipped". A suite begins when
the suites that it depends on have ended and enough processors are free. A build needs no free processor. One build at a
time runs at a low priority, while tests wait. The last line of the output is of that form, too.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LOGS = os.path.join(ROOT, 'build', 'logs')
PROCESSORS = len(os.sched_getaffinity(0))
TIERS = ['base', 'ci', 'all']
COUNTS = re.compile(r'(\d+) passed, (\d+) failed, (\d+) skipped$')


class Suite:
  """A unit of the schedule. `seconds`: its expected processor time, only used for the minutes left."""

  def __init__(self, name, tier, seconds, after=(), processors=2):
    self.name, self.tier, self.seconds, self.after = name, tier, seconds, after
    self.processors = min(processors, PROCESSORS)
    self.log = os.path.join(LOGS, f'{name}.log')
    self.used = 0.0  # seconds of processor time, of all processes that have ended
    self.done = 0.0  # the share of the suite that has run
    self.note = ''   # its progress, as text
    self.counts = None  # passed, failed, skipped
    self.long = []      # unit tests that took longer than their label allows

  def call(self, command, **options):
    """Runs the command into the suite's log; returns its exit status."""
    with open(self.log, 'a', encoding='utf-8') as log:
      log.write(f'$ {" ".join(command)}\n')
      log.flush()
      process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, text=True, errors='replace', **options)
      for line in process.stdout:
        log.write(line)
        log.flush()
        self.read(line)
      _, status, usage = os.wait4(process.pid, 0)
      process.returncode = os.waitstatus_to_exitcode(status)
      self.used += usage.ru_utime + usage.ru_stime
      return process.returncode

  def read(self, line):
    """A line of the output, for progress and counts."""


class Build(Suite):
  """Configures and builds a preset of CMakePresets.json. A failed build counts as a failed test, a good one as none."""

  def __init__(self, preset, tier, seconds, after=(), options=(), targets=(), name=None):
    super().__init__(f'build-{name or preset}', tier, seconds, after, processors=0)
    self.preset, self.options, self.targets = preset, options, targets

  def read(self, line):
    step = re.match(r'\[(\d+)/(\d+)\]', line)
    if step:
      self.done = int(step[1]) / int(step[2])
      self.note = f'{step[1]} of {step[2]} steps'

  def run(self):
    build = ['nice', '-n', '5', 'cmake', '--build', os.path.join('build', self.preset)]
    if self.targets:
      build += ['--target', *self.targets]
    good = self.call(['cmake', '--preset', self.preset, *self.options]) == 0 and self.call(build) == 0
    return (0, 0, 0) if good else (0, 1, 0)


class Packages(Suite):
  """Packages that only later suites need, installed while the first ones run. Tests without them are skipped."""

  def __init__(self, name, tier, seconds, command):
    super().__init__(name, tier, seconds, processors=0)
    self.command = command

  def run(self):
    return (0, 0, 0) if self.call(self.command) == 0 else (0, 0, 1)


class Tests(Suite):
  """Tests of a preset by ctest."""

  def __init__(self, name, preset, tier, seconds, chosen, after=(), processors=2):
    super().__init__(name, tier, seconds, after or [f'build-{preset}'], processors)
    self.preset, self.chosen = preset, chosen

  def read(self, line):
    test = re.match(r'\s*(\d+)/(\d+) Test', line)
    if test:
      self.done = int(test[1]) / int(test[2])
      self.note = f'{test[1]} of {test[2]} tests'

  def run(self):
    junit = os.path.join(LOGS, f'{self.name}.xml')
    if os.path.exists(junit):
      os.unlink(junit)
    jobs = str(PROCESSORS + 1)  # many tests wait for most of their time
    status = self.call(['ctest', '--test-dir', os.path.join('build', self.preset), '-j', jobs, '--output-on-failure',
                        '--no-tests=error', '--output-junit', junit, *self.chosen])
    if not os.path.exists(junit):
      return 0, 1, 0
    suite = xml.etree.ElementTree.parse(junit).getroot()
    for test in suite.iter('testcase'):
      beyond = re.search(r'^budget: (.*): too long', test.findtext('system-out') or '', re.M)
      if beyond:
        self.long.append(f'{test.get("name")}: {beyond[1]}')
    total, bad, disabled, skipped = (int(suite.get(n, 0)) for n in ('tests', 'failures', 'disabled', 'skipped'))
    if status != 0 and bad == 0:
      # A test that could not be started counts as skipped in the file, but is not.
      bad, skipped = 1, max(skipped - 1, 0)
    return total - bad - disabled - skipped, bad, disabled + skipped


class Program(Suite):
  """A program whose last line has its counts. Without such a line it has failed."""

  def __init__(self, name, tier, seconds, command, after=('build-release',), processors=1):
    super().__init__(name, tier, seconds, after, processors)
    self.command = command
    self.last = ''

  def read(self, line):
    if line.strip():
      self.last = line.strip()
    self.note = self.last[:60]

  def run(self):
    status = self.call(self.command)
    counts = COUNTS.match(self.last)
    passed, failed, skipped = (int(n) for n in counts.groups()) if counts else (0, 1, 0)
    return passed, failed or int(status != 0), skipped


class Single(Program):
  """A program that is one test; its exit status is the result."""

  def run(self):
    return (1, 0, 0) if self.call(self.command) == 0 else (0, 1, 0)


def suites():
  """All of them, in the order in which they begin if they can."""
  release = os.path.join(ROOT, 'build', 'release')
  python = os.path.join(ROOT, 'build', 'venv', 'bin', 'python')
  nvcc = os.environ.get('FRUGAL_NVCC', '')
  mutants = [sys.executable, 'tests/mutants/run.py']
  only = '^({})$'.format
  cuda = only('device_open_test|cuda_.*|symbols|readme|host_test|capi_test|gpu_test')
  return [
      Build('release', 'base', 280),
      Packages('peers', 'ci', 60, ['./dev', 'peers']),
      Tests('release', 'release', 'base', 150, ['-L', only('tier_base')]),
      Program('smoke', 'base', 30, ['bindings/smoke', release]),
      Tests('release-ci', 'release', 'ci', 200, ['-L', only('tier_ci')],
            after=['build-release', 'peers', 'release', 'smoke']),
      # Builds run one after the other, in this order.
      Build('tsan', 'ci', 300, after=['build-release']),
      Tests('tsan', 'tsan', 'ci', 450, ['-L', only('tier_base|tier_ci')], after=['build-tsan', 'release-ci'],
            processors=1),
      # One processor each, while ThreadSanitizer's tests run. AddressSanitizer's tests come last: ctest alone can use
      # all processors.
      Program('python', 'ci', 380, ['bindings/python/check', release, python],
              after=['build-release', 'peers', 'release-ci']),
      Program('julia', 'ci', 140, ['bindings/julia/check', release], after=['build-release', 'release-ci']),
      Program('rust', 'ci', 60, ['bindings/rust/check', release], after=['build-release', 'release-ci']),
      Program('mixed', 'ci', 30, ['tests/opscript/check', release], after=['python', 'julia', 'rust']),
      Build('asan', 'ci', 480, after=['build-tsan']),
      Tests('asan', 'asan', 'ci', 220, ['-L', only('tier_base|tier_ci')], after=['build-asan', 'release-ci'],
            processors=1),
      # Programs with code for CUDA, and the tests that run here. The other tests are those of the optimized build.
      Build('gpu', 'ci', 60, after=['build-asan'], options=['-DFRUGAL_CUDA=ON', f'-DCMAKE_CUDA_COMPILER={nvcc}'],
            targets=['frugal', 'frugal_budget', 'gpu_tools', 'cuda_runtime_test', 'frugal_oldest_ptx',
                     'frugal_bad_kernels', 'device_open_test', 'host_test', 'capi_test', 'gpu_test']),
      Tests('gpu', 'gpu', 'ci', 10, ['-R', cuda], after=['build-gpu', 'release-ci'], processors=1),
      Build('nocuda', 'ci', 15, after=['build-gpu'],
            targets=['frugal', 'frugal_budget', 'device_open_test', 'control_none_test', 'manifest_none_test']),
      Tests('nocuda', 'nocuda', 'ci', 2,
            ['-R', only('device_open_test|control_none_test|manifest_none_test|symbols|readme')],
            after=['build-nocuda', 'release-ci'], processors=1),
      # After the long builds.
      Program('mutants', 'ci', 200, [*mutants, '--rotate', '12'], after=['release-ci', 'build-asan'], processors=0),
      Tests('release-all', 'release', 'all', 3000, ['-L', only('tier_all')],
            after=['build-release', 'mixed', 'mutants', 'asan', 'nocuda']),
      Build('tsan', 'all', 60, after=['release-all'], targets=['tests_all'], name='tsan-all'),
      Tests('tsan-all', 'tsan', 'all', 200, ['-L', only('tier_all')], after=['build-tsan-all']),
      Build('clang', 'all', 300, after=['tsan-all']),
      Tests('clang', 'clang', 'all', 200, ['-L', only('tier_base')]),
      Single('aarch64', 'all', 600, ['tests/aarch64.sh'], after=['clang'], processors=2),
      Program('coverage', 'all', 90, ['tests/coverage.sh', '.', 'build/coverage'], after=['clang'], processors=2),
      Single('rehearsal', 'all', 200, [sys.executable, 'tools/gpu/run.py', 'rehearse', '--python', python],
             after=['clang'], processors=2),
      Program('python-asan', 'all', 600,
              ['bindings/python/check', os.path.join(ROOT, 'build', 'asan'), python, '--asan'],
              after=['build-asan', 'rehearsal']),
      Program('frameworks', 'all', 300, ['bindings/python/check', release, python, '--frameworks'],
              after=['rehearsal']),
      Program('mutants-all', 'all', 1500, mutants, after=['rehearsal'], processors=2),
  ]


class Run:
  """Begins suites as soon as they can begin, and prints the progress."""

  def __init__(self, chosen):
    self.waiting, self.running, self.ended = list(chosen), [], []
    self.start = time.monotonic()
    self.begun = {}
    self.lock = threading.Condition()

  def say(self, text):
    elapsed = int(time.monotonic() - self.start)
    print(f'== {elapsed // 60:02d}:{elapsed % 60:02d} {text}', flush=True)

  def left(self):
    """The minutes left, from the expected times of the suites and the speed of this machine so far."""
    # A build's time depends on what is built already.
    expected = sum(s.used if isinstance(s, Build) else s.seconds for s in self.ended)
    expected += sum(s.seconds * s.done for s in self.running)
    rest = sum(s.seconds for s in self.waiting) + sum(s.seconds * (1 - s.done) for s in self.running)
    pace = (time.monotonic() - self.start) / expected if expected > 60 else 1 / PROCESSORS
    minutes = rest * pace / 60
    return 'less than a minute left' if minutes < 1 else f'about {minutes:.0f} min left'

  def may_begin(self, suite):
    names = {s.name for s in self.waiting + self.running}
    if isinstance(suite, Build) and any(isinstance(s, Build) for s in self.running):
      return False
    free = PROCESSORS - sum(s.processors for s in self.running)
    return suite.processors <= free and not names.intersection(suite.after)

  def work(self, suite):
    start = time.monotonic()
    counts = 0, 1, 0
    try:
      failed = {s.name for s in self.ended if isinstance(s, Build) and s.counts[1]}
      if failed.intersection(suite.after) and not isinstance(suite, Build):
        with open(suite.log, 'a', encoding='utf-8') as log:
          log.write('not run: its build failed\n')
      else:
        counts = suite.run()
    except OSError as error:
      with open(suite.log, 'a', encoding='utf-8') as log:
        log.write(f'{error}\n')
    with self.lock:
      suite.counts, suite.took = counts, time.monotonic() - start
      self.running.remove(suite)
      self.ended.append(suite)
      told = '{} passed, {} failed, {} skipped'.format(*counts)
      if isinstance(suite, (Build, Packages)):
        told = 'done' if counts == (0, 0, 0) else 'NOT done'
      if counts[1]:
        self.tell_failure(suite)
      self.say(f'{suite.name}: {told} ({suite.took:.0f} s, {suite.used:.0f} of a processor); {self.left()}')
      self.lock.notify()

  @staticmethod
  def said_of(lines):
    """The output of a red test, which `lines` begin with. Of a long one: its end, and what looks like a failure."""
    others = re.compile(r' *(Start +\d+:|\d+/\d+ Test +#)')
    said = lines[:1] + list(itertools.takewhile(lambda line: not others.match(line), lines[1:]))
    if len(said) <= 80:
      return said
    wrong = [i for i, line in enumerate(said[:-30]) if re.search(r'Failure|FAILED|Error|ERROR|rror:', line)]
    shown = sorted({j for i in wrong[:20] for j in range(i, min(i + 8, len(said) - 30))})
    return said[:1] + [said[j] for j in shown] + ['...'] + said[-30:]

  def tell_failure(self, suite):
    with open(suite.log, encoding='utf-8', errors='replace') as log:
      lines = log.read().splitlines()
    # ctest prints the output of a red test when the test ends, which may be far above.
    red = [i for i, line in enumerate(lines) if re.search(r'\*\*\*(Failed|Timeout|Exception|Not Run)', line)]
    shown = lines[-60:]
    if red:
      shown = [line for i in red[:5] for line in self.said_of(lines[i:])] + lines[-20:]
    print('\n'.join(shown), flush=True)
    self.say(f'{suite.name} is red; all of it: {os.path.relpath(suite.log, ROOT)}')

  def go(self):
    told = time.monotonic()
    with self.lock:
      while self.waiting or self.running:
        for suite in [s for s in self.waiting if self.may_begin(s)]:
          if not self.may_begin(suite):
            continue  # a suite before it has taken the processors
          self.waiting.remove(suite)
          self.running.append(suite)
          open(suite.log, 'w', encoding='utf-8').close()
          self.say(f'{suite.name} begins; {self.left()}')
          threading.Thread(target=self.work, args=[suite], daemon=True).start()
        self.lock.wait(1)
        if time.monotonic() - told > 60:
          told = time.monotonic()
          at = ', '.join(f'{s.name} ({s.note})' if s.note else s.name for s in self.running)
          self.say(f'{at}; {self.left()}')


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('--ci', action='store_true')
  parser.add_argument('--all', action='store_true')
  parser.add_argument('--only', action='append', default=[], metavar='SUITE')
  parser.add_argument('--no-skips', action='store_true')
  parser.add_argument('--json')
  args = parser.parse_args()
  every = suites()
  if args.only:
    names = set(args.only)
    unknown = names - {s.name for s in every}
    if unknown:
      sys.exit(f'no suite {", ".join(sorted(unknown))}; there are {", ".join(s.name for s in every)}')
    # With the builds and packages that they depend on, and without the tests that come before.
    chosen = [s for s in every if s.name in names or isinstance(s, (Build, Packages)) and
              any(s.name in o.after for o in every if o.name in names and not isinstance(o, Build))]
  else:
    tier = 2 if args.all else 1 if args.ci else 0
    chosen = [s for s in every if TIERS.index(s.tier) <= tier]
  os.makedirs(LOGS, exist_ok=True)
  run = Run(chosen)
  run.go()
  passed, failed, skipped = (sum(s.counts[i] for s in chosen) for i in range(3))
  if args.json:
    with open(args.json, 'w', encoding='utf-8') as out:
      json.dump([{'suite': s.name, 'seconds': round(s.took, 1), 'processor': round(s.used, 1), 'counts': s.counts}
                 for s in chosen], out, indent=1)
  for suite in chosen:
    for test in suite.long:
      print(f'   {suite.name}: too long for a unit test: {test}')
  for suite in chosen:
    print(f'   {suite.name:14s} {suite.took:6.0f} s {suite.used:6.0f} s   '
          f'{suite.counts[0]:5d} {suite.counts[1]:3d} {suite.counts[2]:3d}')
  run.say('that was all')
  print(f'{passed} passed, {failed} failed, {skipped} skipped')
  if failed:
    return 1
  if args.no_skips and skipped:
    # Where everything can be installed, no test may be skipped.
    print('skipped tests count as failures here')
    return 1
  return 0


if __name__ == '__main__':
  sys.exit(main())
