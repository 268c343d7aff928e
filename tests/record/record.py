#!/usr/bin/env python3
"""The record of bits: what a library gives for configurations of the oracle, op scripts and the demo.

    record.py BUILD                           compares the library of BUILD with record.txt in this file's folder
    record.py BUILD --of FOLDER               tests the library of another build folder or installation with the
                                              programs of BUILD
    record.py BUILD --of FOLDER --with OTHER  compares two libraries
    record.py BUILD --of FOLDER --write FILE  makes a record
    --rotate         only some of the lines; the commit that is checked out decides which, so later commits try others
    --more ARGUMENT  for the oracle, as --more=--flush-threads --more=0: DRAWN is then not compared
    --qemu FOLDER    all programs are of AArch64, and qemu-aarch64 runs them; FOLDER is their root. Lines of several
                     processes are left out: qemu-aarch64 emulates one process

A line of the record is KIND NAME DRAWN TABLES OUTSIDE LOOKUPS and what the line has of each feature. DRAWN is a hash of
what the program has drawn. If it differs, the programs have changed, and the record has to be made again with the
library that made it. TABLES is a hash of all rows with their state at the end. OUTSIDE is a hash of the results of get,
put, delete and the like between steps. LOOKUPS is a hash of all looked-up rows, or "-" where staleness does not
determine them.
    config  a configuration of the oracle: threads, attached processes, ranks on sim:N, aborts. Or a controller that is
            killed before its last step is committed; then its trainers read its tables out
    script  an op script in one process; -attached: in an attached process; -dealt: in several
    demo    the first 20 steps of examples/kge
The programs use only the C ABI, so it does not matter with which library they were built. Exit status 0 if there is no
difference.
"""

import argparse
import contextlib
import glob
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(HERE), 'opscript'))
import compare  # noqa: E402

RECORD = os.path.join(HERE, 'record.txt')
FIRST, CONFIGS, SCRIPTS = 9_000_001, 300, 60
STEPS = 40  # of a script
COLUMNS = ['drawn', 'tables', 'outside', 'lookups']
# How many configurations of the whole record have at least one of these, or it shows little.
WANTED = {'processes': 40, 'killed': 10, 'aborts': 50, 'put': 50, 'delete': 50, 'sim': 20, 'cached': 100, 'stale': 20}


class Machine:
  """This machine."""

  processes = True  # it can run several processes that share memory

  def program(self, path):
    """The path of a file that runs the program."""
    return path

  def libraries(self, program):
    """The libraries that the program loads, as text."""
    return subprocess.run([program], env={**os.environ, 'LD_TRACE_LOADED_OBJECTS': '1'}, check=True,
                          capture_output=True, text=True).stdout


class Emulated(Machine):
  """A machine that qemu-aarch64 emulates: for each program a file in the folder starts qemu-aarch64 with it."""

  processes = False

  def __init__(self, root, folder):
    self.qemu = ['qemu-aarch64', '-L', os.path.abspath(root)]
    self.folder = folder
    self.paths = {}

  def program(self, path):
    number = len(self.paths)
    wrapper = os.path.join(self.folder, f'{number}-{os.path.basename(path)}')
    with open(wrapper, 'w', encoding='utf-8') as file:
      file.write(f'#!/bin/sh\nexec {shlex.join([*self.qemu, path])} "$@"\n')
    os.chmod(wrapper, 0o700)
    self.paths[wrapper] = path
    return wrapper

  def libraries(self, program):
    return subprocess.run([*self.qemu, '-E', 'LD_TRACE_LOADED_OBJECTS=1', self.paths[program]], check=True,
                          capture_output=True, text=True).stdout

class Side:
  """A library and its controller."""

  def __init__(self, folder, machine):
    self.machine = machine
    self.shared = self.find(folder, [f'{where}libfrugal.so.0' for where in ('tests/sim/', '', 'lib/', 'lib/*/')])
    self.controller = machine.program(
        self.find(folder, ['tools/controller/frugal-controller', 'bin/frugal-controller']))

  @staticmethod
  def find(folder, patterns):
    for pattern in patterns:
      for path in glob.glob(os.path.join(folder, pattern)):
        return os.path.realpath(path)
    sys.exit(f'{folder} has no {os.path.basename(patterns[0])}')

  @contextlib.contextmanager
  def loaded(self, programs):
    """Within this context `programs` load this library."""
    before = os.environ.get('LD_LIBRARY_PATH')
    with tempfile.TemporaryDirectory() as folder:
      os.symlink(self.shared, os.path.join(folder, 'libfrugal.so.0'))
      os.environ['LD_LIBRARY_PATH'] = folder
      for program in programs:
        traced = self.machine.libraries(program)
        if f'{folder}/libfrugal.so.0 ' not in traced:
          sys.exit(f'{program} does not load {self.shared}:\n{traced}')
      yield
    del os.environ['LD_LIBRARY_PATH']
    if before is not None:
      os.environ['LD_LIBRARY_PATH'] = before


def run(command, timeout=3600):
  """Returns the command's output, or None after a time-out. Prints a failure."""
  try:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors='replace',
                          timeout=timeout)
  except subprocess.TimeoutExpired:
    print(f'no end after {timeout} s: {" ".join(command)}', flush=True)
    return None
  if done.returncode != 0:
    print(f'exit status {done.returncode}: {" ".join(command)}\n{(done.stdout + done.stderr)[-2000:]}', flush=True)
  return done.stdout


def alone(key, fields):
  """Whether one process makes this line of a record."""
  return 'processes=0' in fields if key[0] == 'config' else '-' not in key[1]


def configs(programs, side, part, more):
  if side.machine.processes:
    parts = [part]
  else:
    known = (key for key, fields in read(RECORD).items() if key[0] == 'config' and alone(key, fields))
    parts = [(int(seed), 1) for _, seed in known if 0 <= int(seed) - part[0] < part[1]]
  out = [run([programs['oracle'], '--draw', '--record', '--device', 'sim:0,sim:1', '--controller', side.controller,
              '--first', str(first), '--seeds', str(count), *more]) for first, count in parts]
  return [line for text in out for line in (text or '').splitlines() if line.startswith('config ')]


def short(*texts):
  return hashlib.sha256('\n'.join(texts).encode()).hexdigest()[:16]


def script_line(name, script, outputs):
  """The record's line of a script, of which one process or several have printed `outputs`."""
  with open(script, encoding='utf-8') as file:
    drawn = short(file.read())
  tables = [' '.join(compare.tables_of(lines)) for lines in outputs]
  if any(not lines for lines in outputs) or len(set(tables)) != 1:
    print(f'script {name}: no hashes, or not the same ones of all processes', flush=True)
    return None
  return f'script {name} {drawn} {short(tables[0])} - {short(*("/".join(lines) for lines in outputs))}'


def scripts(programs, side, seeds):
  lines = []
  runner = programs['opscript_c']
  for seed in seeds:
    with tempfile.TemporaryDirectory() as folder:
      script = os.path.join(folder, 'script')
      compare.make([programs['opscript_maker']], seed, STEPS, script)
      script += '.jsonl'
      lines.append(script_line(seed, script, [(run([runner, script], compare.TIMEOUT) or '').splitlines()]))
      if side.machine.processes and seed % 3 == 0:
        with compare.controller(side.controller, folder) as environment:
          os.environ['FRUGAL_SERVICE'] = environment['FRUGAL_SERVICE']
          lines.append(script_line(f'{seed}-attached', script,
                                   [(run([runner, script], compare.TIMEOUT) or '').splitlines()]))
          del os.environ['FRUGAL_SERVICE']
      if side.machine.processes and seed % 6 == 1:
        ranks = 2 + seed % 7
        dealt = os.path.join(folder, 'dealt')
        compare.make([programs['opscript_maker']], seed, STEPS, dealt, ranks, ranks)
        wrong, printed = compare.replay_dealt([[runner]] * ranks, side.controller, dealt + '.jsonl')
        print(''.join(f'script {seed}, process {i}: {w}\n' for i, w in enumerate(wrong) if w), end='', flush=True)
        lines.append(script_line(f'{seed}-dealt', dealt + '.jsonl', printed))
  return [line for line in lines if line]


def demo(programs):
  return [line for line in (run([programs['record_demo']], 600) or '').splitlines() if line.startswith('demo ')]


def make(programs, side, part, seeds, more):
  """The lines of the record by kind and name."""
  with side.loaded([programs[name] for name in ('oracle', 'opscript_c', 'record_demo')]):
    lines = configs(programs, side, part, more) + scripts(programs, side, seeds) + demo(programs)
  return {tuple(line.split()[:2]): line.split() for line in lines}


def read(path):
  with open(path, encoding='ascii') as file:
    return {tuple(line.split()[:2]): line.split() for line in file if not line.startswith('#')}


def in_order(key):
  number = key[1].split('-')[0]
  return key[0], int(number) if number.isdigit() else 0, key[1]


def shown(record):
  """How many configurations have each feature."""
  counts = dict.fromkeys(WANTED, 0)
  for key, fields in record.items():
    for field in fields[6:] if key[0] == 'config' else []:
      name, _, value = field.partition('=')
      counts[name] = counts.get(name, 0) + (value != '0')
  return {name: counts[name] for name in WANTED}


def differences(expected, got, with_drawn):
  """Prints the first differences. Returns how many lines differ."""
  count = 0
  for key in sorted(expected.keys() | got.keys(), key=in_order):
    if key not in got or key not in expected:
      what = 'was not made' if key not in got else 'was made here alone'
    else:
      # If something else was drawn, the other hashes mean nothing.
      here = [name for name, a, b in zip(COLUMNS, expected[key][2:6], got[key][2:6]) if a != b]
      here = here[:1] if with_drawn and 'drawn' in here else [name for name in here if name != 'drawn']
      what = f'other {", ".join(here)}' if here else ''
    if what:
      count += 1
    if what and count <= 40:
      print(f'{" ".join(key)}: {what}; {" ".join(expected.get(key, got.get(key))[6:])}', flush=True)
  return count


def rotated():
  """A part of the configurations and of the scripts."""
  commit = subprocess.run(['git', '-C', HERE, 'rev-parse', 'HEAD'], capture_output=True, text=True).stdout.strip()
  at = int(hashlib.sha256(commit.encode()).hexdigest(), 16)
  configurations, some = 20, 6
  first = at % (CONFIGS // configurations) * configurations
  print(f'of commit {commit or "none"}: configurations from {FIRST + first}', flush=True)
  script = at // CONFIGS % (SCRIPTS // some) * some + 1
  return (FIRST + first, configurations), list(range(script, script + some))


def main():
  parser = argparse.ArgumentParser(usage=__doc__)
  parser.add_argument('build')
  parser.add_argument('--of')
  parser.add_argument('--with', dest='other')
  parser.add_argument('--write')
  parser.add_argument('--rotate', action='store_true')
  parser.add_argument('--more', action='append', default=[])
  parser.add_argument('--qemu')
  arguments = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    return compared(arguments, Emulated(arguments.qemu, folder) if arguments.qemu else Machine())


def compared(arguments, machine):

  tests = os.path.join(os.path.abspath(arguments.build), 'tests')
  programs = {name: os.path.join(tests, folder, name) for folder, name in (
      ('', 'oracle'), ('opscript', 'opscript_maker'), ('opscript', 'opscript_c'), ('record', 'record_demo'))}
  for program in programs.values():
    if not os.access(program, os.X_OK):
      sys.exit(f'{program} is not there: build the target {os.path.basename(program)}')
  programs = {name: machine.program(path) for name, path in programs.items()}

  part, seeds = (FIRST, CONFIGS), list(range(1, SCRIPTS + 1))
  if arguments.rotate:
    part, seeds = rotated()
  side = Side(arguments.of or arguments.build, machine)
  got = make(programs, side, part, seeds, arguments.more)
  if arguments.other:
    expected = make(programs, Side(arguments.other, machine), part, seeds, arguments.more)
  elif arguments.write:
    expected = got
  else:
    expected = read(RECORD)
    if not machine.processes:
      expected = {key: fields for key, fields in expected.items() if alone(key, fields)}
    if arguments.rotate:
      chosen = range(part[0], part[0] + part[1])
      expected = {key: fields for key, fields in expected.items() if key[0] == 'demo' or
                  int(key[1].split('-')[0]) in (chosen if key[0] == 'config' else seeds)}

  differ = differences(expected, got, not arguments.more)
  if not arguments.rotate and machine.processes:
    seen = shown(got)
    print('configurations with', ', '.join(f'{name} {count}' for name, count in seen.items()))
    few = [name for name, least in WANTED.items() if seen[name] < least]
    if few:
      print(f'too few configurations have {", ".join(few)}')
      differ += len(few)
    scripts_made = {key[1] for key in got if key[0] == 'script'}
    if len(got) < CONFIGS + SCRIPTS or not any('dealt' in name for name in scripts_made):
      print('not everything was made')
      differ += 1
  if arguments.write and not differ:
    with open(arguments.write, 'w', encoding='ascii') as file:
      file.write('# The record of tests/record/record.py: kind, name, drawn, tables, outside, lookups, features.\n')
      for key in sorted(got, key=in_order):
        file.write(' '.join(got[key]) + '\n')
  print(f'record: {len(got)} lines, {differ} differences')
  return 1 if differ else 0


if __name__ == '__main__':
  sys.exit(main())
