"""Does each mutant turn the tests red?

A mutant is tests/mutants/NAME.patch: a diff (paths from the repository's root, -p1) after a head of
comment lines:

    # What the mutant breaks, in a line.
    # tests: oracle --stop --seeds 400 --mode 2
    # timeout: 120

Each `tests:` line is a command: a program of the build's tests folder with its arguments, or
`ctest` with arguments. For `ctest` a line `# builds: PROGRAM...` names the programs that it runs.
The commands run in turn. The mutant is killed as soon as one fails or exceeds the timeout (seconds,
each; default 180). All mutants share one copy of the tree and one build folder. A command's programs
are built just before it, so only files are compiled that this mutant or the one before has touched.

A patch that does not apply or compile is an error, not a kill. In the end the unchanged tree must
pass each command that was red, or a test that is always red would kill everything. Such a command
runs for at most three times its slowest kill: later than that it has killed no mutant. Exit status:
0 if all mutants were killed. The last line counts killed mutants as passed and the others as failed.

    tests/mutants/run.py [--json FILE] [--rotate N | NAME ...]
    tests/mutants/run.py --list [NAME ...]

--rotate N tries N of them. The commit that is checked out decides which, so that later commits try
the others. --list prints each mutant's name and the rule that it breaks, and tries none.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
WORK = os.path.join(ROOT, 'build', 'mutants')
SOURCE = os.path.join(WORK, 'src')
BUILD = os.path.join(SOURCE, 'build', 'release')  # as deep as the others, for the paths in ccache's keys
LOG = os.path.join(WORK, 'log')


class Mutant:

  def __init__(self, path):
    self.path = path
    self.name = os.path.basename(path)[:-len('.patch')]
    self.what, self.tests, self.built, self.timeout = '', [], [], 180
    with open(path, encoding='utf-8') as f:
      for row in f:
        if not row.startswith('#'):
          break
        text = row[1:].strip()
        if text.startswith('tests:'):
          self.tests.append(tuple(text[len('tests:'):].split()))
        elif text.startswith('builds:'):
          self.built = text[len('builds:'):].split()
        elif text.startswith('timeout:'):
          self.timeout = int(text[len('timeout:'):])
        elif not self.what:
          self.what = text
    if not self.what:
      sys.exit(f'{path}: no line says what it breaks')
    if not self.tests:
      sys.exit(f'{path}: no "# tests:" line')
    if any(test[0] == 'ctest' for test in self.tests) and not self.built:
      sys.exit(f'{path}: no "# builds:" line')

  def targets_of(self, test):
    return self.built if test[0] == 'ctest' else [test[0]]


def run(command, timeout=None, cwd=None):
  with open(LOG, 'a', encoding='utf-8') as log:
    log.write(f'$ {" ".join(command)}\n')
    log.flush()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=cwd,
                               env={**os.environ, 'GTEST_FAIL_FAST': '1'}, start_new_session=True)
    try:
      return process.wait(timeout)
    finally:
      if process.poll() is None:  # and the processes that it started: ctest's tests outlive ctest
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def must(command, what):
  if run(command) != 0:
    sys.exit(f'mutants: {what}; see {LOG}')


def copy_tree():
  """Copies the files that git tracks or would track. It does not touch files that are equal already."""
  listed = subprocess.run(['git', '-C', ROOT, 'ls-files', '-co', '--exclude-standard', '-z'],
                          check=True, capture_output=True).stdout.decode().split('\0')
  wanted = {name for name in listed if name and os.path.isfile(os.path.join(ROOT, name))}
  for folder, _, files in os.walk(SOURCE):
    for file in files:
      path = os.path.join(folder, file)
      if path.startswith(BUILD + os.sep):
        continue
      if os.path.relpath(path, SOURCE) not in wanted:
        os.unlink(path)
  for name in wanted:
    source, target = os.path.join(ROOT, name), os.path.join(SOURCE, name)
    with open(source, 'rb') as f:
      data = f.read()
    if os.path.exists(target):
      with open(target, 'rb') as f:
        if f.read() == data:
          continue
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(target, 'wb') as f:
      f.write(data)
    shutil.copymode(source, target)


def build(targets):
  return run(['cmake', '--build', BUILD, '--target', *sorted(targets)])


def command_of(test):
  if test[0] == 'ctest':
    return ['ctest', '--test-dir', BUILD, '--no-tests=error', *test[1:]]
  for folder, _, files in os.walk(os.path.join(BUILD, 'tests')):
    path = os.path.join(folder, test[0])
    if test[0] in files and os.access(path, os.X_OK):
      return [path, *test[1:]]
  sys.exit(f'mutants: no program {test[0]} in {BUILD}/tests')


HANGS = 'hangs'


def ends(test, timeout):
  """How a red test ends; None if the test is green."""
  try:
    status = run(command_of(test), timeout=timeout, cwd=BUILD)
  except subprocess.TimeoutExpired:
    return HANGS
  return signal.Signals(-status).name if status < 0 else f'exit {status}' if status else None


def try_mutant(mutant, reds):
  """(killed, the test that killed it or the reason why none did)"""
  copy_tree()
  # No fuzz: a hunk that is applied in another place breaks another rule than the head says.
  if run(['patch', '-p1', '-s', '-F', '0', '-d', SOURCE, '-i', mutant.path]) != 0:
    return False, 'ERROR: does not apply'
  for test in mutant.tests:
    if build(mutant.targets_of(test)) != 0:
      return False, 'ERROR: does not compile'
    start = time.monotonic()
    end = ends(test, mutant.timeout)
    if end:
      reds.setdefault(test, []).append((time.monotonic() - start, end))
      return True, f'{" ".join(test)}: {end}'
  return False, 'SURVIVED'


def check_unchanged(targets, reds):
  """`reds`: for each command that was red, the seconds and the end of each run."""
  copy_tree()
  if build(targets) != 0:
    sys.exit(f'mutants: the unchanged tree does not build any more; see {LOG}')
  for test, times in reds.items():
    start = time.monotonic()
    end = ends(test, max(5, 3 * max(seconds for seconds, _ in times)))
    if end and (end != HANGS or HANGS in (how for _, how in times)):
      sys.exit(f'mutants: red without any mutant: {" ".join(test)}: {end}; see {LOG}')
    told = 'is green so far' if end else 'is green'
    print(f'unchanged: {" ".join(test)} {told} ({time.monotonic() - start:.0f} s)', flush=True)


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('--json')
  parser.add_argument('--rotate', type=int)
  parser.add_argument('--list', action='store_true')
  parser.add_argument('names', nargs='*')
  args = parser.parse_args()
  mutants = [Mutant(os.path.join(HERE, name)) for name in sorted(os.listdir(HERE))
             if name.endswith('.patch') and (not args.names or name[:-6] in args.names)]
  if not mutants or len(mutants) < len(set(args.names)):
    sys.exit('mutants: no such mutant')
  if args.list:
    for m in mutants:
      print(f'{m.name:28s} {m.what}')
    return 0
  if args.rotate:
    commit = subprocess.run(['git', '-C', ROOT, 'rev-parse', 'HEAD'], capture_output=True, text=True).stdout.strip()
    mutants.sort(key=lambda m: hashlib.sha256((commit + m.name).encode()).hexdigest())
    mutants = mutants[:args.rotate]
    print(f'of commit {commit}: {" ".join(m.name for m in mutants)}', flush=True)
  os.makedirs(SOURCE, exist_ok=True)
  open(LOG, 'w', encoding='utf-8').close()
  copy_tree()
  must(['cmake', '-S', SOURCE, '-B', BUILD, '-G', 'Ninja', '-DCMAKE_BUILD_TYPE=Release',
        '-DFRUGAL_BENCH=OFF', '-DFRUGAL_EXAMPLES=OFF', '-DFRUGAL_CUDA=OFF'],
       'the tree does not configure')
  targets = {target for m in mutants for test in m.tests for target in m.targets_of(test)}
  if build(targets) != 0:
    sys.exit(f'mutants: the unchanged tree does not build; see {LOG}')
  results, reds = [], {}
  for m in mutants:
    start = time.monotonic()
    killed, by = try_mutant(m, reds)
    results.append({'name': m.name, 'what': m.what, 'killed': killed, 'by': by,
                    'seconds': round(time.monotonic() - start, 1)})
    print(f'{m.name:22s} {"killed" if killed else by:8s} {results[-1]["seconds"]:6.1f} s  '
          f'{by.split(": ")[-1] if killed else "":8s} {m.what}', flush=True)
  check_unchanged(targets, reds)
  if args.json:
    with open(args.json, 'w', encoding='utf-8') as f:
      json.dump(results, f, indent=1)
  alive = [r['name'] for r in results if not r['killed']]
  if alive:
    print(f'not killed: {", ".join(alive)}')
  print(f'{len(results) - len(alive)} passed, {len(alive)} failed, 0 skipped')
  return 1 if alive else 0


if __name__ == '__main__':
  sys.exit(main())
