"""./dev gpu: everything that needs a GPU, and its rehearsal without one.

The programs are built from this tree alone, with CMake, ninja, a C++ compiler and, for cuda:N, nvcc. Each command ends
within 8 minutes, its build included. After every case it adds a line of JSON to gpu-results.jsonl, in $OUT or
build/gpu-results. So a run that is cut off keeps its results, and the next run of the same commit on the same GPU
continues after them.
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path('tools/gpu')
LIMIT = 470.0  # seconds of a command
PACK_LIMIT = 64 << 20
TOOLS = ('memcheck', 'racecheck', 'initcheck', 'synccheck')


class Run:
  """A run of one command: its clock, its results, its counts."""

  def __init__(self, args):
    self.args = args
    self.start = time.monotonic()
    self.passed = self.failed = self.skipped = self.unmet = self.before = 0
    self.over = False  # a case was left out because the time was over
    self.earlier = {}  # lines of earlier runs, by key_of
    self.commit = commit(args.commit)
    folder = pathlib.Path(os.environ.get('OUT') or ROOT / 'build/gpu-results').absolute()
    folder.mkdir(parents=True, exist_ok=True)
    self.results = folder / 'gpu-results.jsonl'
    if self.results.exists() and not self.results.read_bytes()[-1:] in (b'', b'\n'):
      with open(self.results, 'ab') as f:
        f.write(b'\n')  # ends the last line, which a lost machine left incomplete
    self.on_gpu = args.device.startswith('cuda:')
    self.build_folder = ROOT / 'build' / ('gpu-native' if self.on_gpu else 'gpu-sim')
    self.logs = ROOT / 'build/logs'
    self.logs.mkdir(parents=True, exist_ok=True)
    self.line(begin=args.command, commit=self.commit, device=args.device, quick=args.quick,
              date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
              cores=os.cpu_count(), **(versions(args.device) if self.on_gpu else {}))

  def left(self):
    return LIMIT - (time.monotonic() - self.start)

  def line(self, **fields):
    text = json.dumps(fields)
    with open(self.results, 'a', encoding='utf-8') as f:
      f.write(text + '\n')
      f.flush()
      os.fsync(f.fileno())
    print(text, flush=True)

  def outcome(self, met, **fields):
    """Counts and writes a case. `met`: True, False, or None for one that could not run."""
    if met is None:
      self.skipped += 1
    elif met:
      self.passed += 1
    else:
      self.failed += 1
    self.line(**fields, met=met)

  def no_time(self, **fields):
    self.over = True
    self.outcome(None, **fields, skipped='the time is over')

  def done_before(self, case, params):
    """Whether an earlier run has the result of a case, which then does not run again."""
    if key_of({'case': case, 'params': params}) not in self.earlier:
      return False
    self.before += 1
    return True

  def program(self, name):
    return str(self.build_folder / 'tools/gpu' / name)

  def build(self):
    began = time.monotonic()
    options = ['-DCMAKE_BUILD_TYPE=Release', '-DFRUGAL_GPU_TOOLS=ON', '-DFRUGAL_TESTS=OFF',
               '-DFRUGAL_BENCH=OFF', '-DFRUGAL_EXAMPLES=OFF', '-DFRUGAL_TOOLS=OFF',
               f'-DFRUGAL_CUDA={"ON" if self.on_gpu else "OFF"}']
    if self.on_gpu:
      options.append(f'-DCMAKE_CUDA_ARCHITECTURES={architecture(self.args.device)}')
      if os.environ.get('CUDACXX'):
        options.append(f'-DCMAKE_CUDA_COMPILER={os.environ["CUDACXX"]}')
    options += shlex.split(os.environ.get('FRUGAL_GPU_CMAKE', ''))
    commands = [['cmake', '-S', '.', '-B', str(self.build_folder), '-G', 'Ninja', *options],
                ['cmake', '--build', str(self.build_folder), '--target', 'gpu_tools', 'frugal', 'frugal_with_sim']]
    for i, command in enumerate(commands):
      log = self.logs / f'{self.build_folder.name}-{("configure", "build")[i]}.log'
      code, _ = self.call(command, log=log, timeout=self.left() - 30)
      if code != 0:
        tail = log.read_text(errors='replace')[-3000:]
        print(tail, file=sys.stderr)
        self.outcome(False, case='build', error=tail[-600:], exit=code)
        return False
    self.line(case='build', seconds=round(time.monotonic() - began, 1))
    return True

  def open(self):
    """Writes what the device is, as the engine sees it, and reads the results of earlier runs on it."""
    code, out = self.call([self.program('gpu_litmus'), '--device', self.args.device, '--info'],
                          timeout=min(100.0, self.left() - 5))
    told = re.search(r'^\{"gpu".*\}$', out, flags=re.M)
    if code != 0 or not told:
      self.outcome(False, case='device', exit=code, error=out[-600:])
      return False
    device = json.loads(told.group())
    self.line(**device)
    if not self.args.again and is_commit(self.commit):
      files = [*self.args.done, *([self.results] if self.results.exists() else [])]
      self.earlier = earlier(files, {'begin': self.args.command, 'commit': self.commit,
                                     'quick': self.args.quick, 'gpu': device['gpu']})
    return True

  def call(self, command, log=None, timeout=None, echo=False):
    """Returns (exit status, or None if the time was over; output)."""
    try:
      # In a process group of its own, so that the processes that it starts are killed with it. With several kinds of
      # GPUs CUDA would number the fastest first, which nvidia-smi does not.
      process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, start_new_session=True,
                                 env={**os.environ, 'CUDA_DEVICE_ORDER': 'PCI_BUS_ID'})
    except OSError as e:
      return 127, str(e)
    deadline = time.monotonic() + max(1.0, self.left() if timeout is None else timeout)
    out, over = b'', False
    fd = process.stdout.fileno()
    while True:
      if select.select([fd], [], [], 0.2)[0]:
        part = os.read(fd, 1 << 16)
        if not part:
          break
        out += part
        if echo:
          sys.stdout.buffer.write(part)
          sys.stdout.flush()
      if time.monotonic() > deadline:
        over = True
        os.killpg(process.pid, signal.SIGKILL)
        break
    code = process.wait()
    process.stdout.close()
    text = out.decode(errors='replace')
    if log:
      log.write_text(text)
    return (None if over else code), text

  def end(self):
    self.line(end=self.args.command, passed=self.passed, failed=self.failed, skipped=self.skipped, unmet=self.unmet,
              before=self.before, seconds=round(time.monotonic() - self.start, 1))
    print(f'gpu {self.args.command} on {self.args.device}: {self.passed} passed, {self.failed} failed, '
          f'{self.skipped} skipped, {self.before} done before, {self.unmet} aims not met, '
          f'{time.monotonic() - self.start:.0f} s; results: {self.results}')
    if self.over:
      print('The time was over: the same command again continues, with --done FILE where these results are not.')
    # On a GPU at least one case must have passed, now or, if no case is left to do, before.
    ran = self.passed + (0 if self.over else self.before) + (0 if self.on_gpu else self.skipped)
    return 0 if self.failed == 0 and ran > 0 else 1


def output(command):
  try:
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          text=True, timeout=30, check=False).stdout.strip()
  except (OSError, subprocess.TimeoutExpired):
    return ''


def commit(told):
  if told:
    return told
  if (ROOT / '.git').exists():
    head = output(['git', 'rev-parse', 'HEAD'])
    if head:
      return head + (' with changes' if output(['git', 'status', '--porcelain', '-uno']) else '')
  packed = (ROOT / HERE / 'commit').read_text().strip()
  return 'unknown' if packed.startswith('$') else packed


def is_commit(text):
  """Only a commit's hash says exactly which tree results belong to: anything else may have had changes."""
  return re.fullmatch('[0-9a-f]{40}', text) is not None


def key_of(case):
  return case['case'] + json.dumps(case.get('params'), sort_keys=True)


def earlier(files, wanted):
  """The lines of cases that such runs have finished: not skipped, not failed."""
  lines = {}
  for begin, cases, _ in read_runs(files):
    if {k: begin.get(k) for k in wanted} != wanted:
      continue
    for case in cases:
      if 'params' not in case or 'skipped' in case or 'error' in case:
        continue
      lines[key_of(case)] = case
  return lines


def nvidia_smi(device, fields):
  """Asks nvidia-smi about cuda:N. That is the N-th of CUDA_VISIBLE_DEVICES, and nvidia-smi lists all GPUs."""
  number = device.split(':')[1]
  visible = [v.strip() for v in os.environ.get('CUDA_VISIBLE_DEVICES', '').split(',')]
  if all(v.isdecimal() for v in visible):
    if int(number) >= len(visible):
      return ''
    number = visible[int(number)]
  return output(['nvidia-smi', f'--id={number}', f'--query-gpu={fields}', '--format=csv,noheader'])


def versions(device):
  driver = nvidia_smi(device, 'driver_version')
  if not driver:
    try:
      text = pathlib.Path('/proc/driver/nvidia/version').read_text()
    except OSError:
      text = ''
    found = re.search(r'NVRM version:.*?\s(\d+\.[\d.]+)\s', text)
    driver = found.group(1) if found else ''
  nvcc = re.search(r'release ([\d.]+)', output([find_tool('nvcc') or 'nvcc', '--version']))
  return {'driver': driver, 'cuda': nvcc.group(1) if nvcc else ''}


def architecture(device):
  """The GPU's architecture, in CMake's form."""
  capability = nvidia_smi(device, 'compute_cap')
  return capability.replace('.', '') if re.fullmatch(r'\d+\.\d', capability) else 'native'


def find_tool(name):
  places = [os.environ.get(v, '') + '/bin' for v in ('CUDA_PATH', 'CUDA_HOME') if os.environ.get(v)]
  if os.environ.get('CUDACXX'):
    places.append(os.path.dirname(os.environ['CUDACXX']))
  return shutil.which(name) or shutil.which(name, path=os.pathsep.join(places + ['/usr/local/cuda/bin']))


# --- The commands -------------------------------------------------------------------------------


def seeds():
  for line in (ROOT / HERE / 'seeds.txt').read_text().splitlines():
    words = line.split('#')[0].split()
    if words:
      yield words[0], words[1:]


def oracle(run):
  entries = list(seeds())
  if run.args.quick:
    entries = entries[::7]
  for seed, options in entries:
    params = {'seed': int(seed), 'options': ' '.join(options)}
    if run.done_before('oracle', params):
      continue
    if run.left() < 15:
      run.no_time(case='oracle', params=params)
      continue
    began = time.monotonic()
    code, out = run.call([run.program('oracle_device'), '--device', run.args.device, '--first', seed,
                          '--seeds', '1', '--jobs', '1', '--hang-seconds', '100', *options],
                         timeout=min(120.0, run.left() - 5))
    if code is None and run.left() < 10:
      run.no_time(case='oracle', params=params)
      continue
    found = re.search(r'oracle: (\d+) passed, (\d+) failed', out)
    rows = re.search(r'rows compared\s+(\d+)', out)
    met = (code == 0 and found is not None and int(found.group(1)) == 1 and rows is not None
           and int(rows.group(1)) > 0)
    facts = {} if met else {'exit': code, 'error': out[-1500:]}
    run.outcome(met, case='oracle', params=params, aim='bit for bit',
                figures={'rows_compared': int(rows.group(1)) if rows else 0,
                         'seconds': round(time.monotonic() - began, 2)}, **facts)


def own_lines(run, command, most, kept):
  """Runs a program that itself adds its lines to the results. It gets at most `most` seconds, and `kept` remain.

  Returns its cases, and whether the time was over before it was done.
  """
  limit = min(most, run.left() - kept)
  code, out = run.call([*command, '--results', str(run.results)], timeout=limit, echo=True)
  cases = [json.loads(line) for line in out.splitlines() if re.match(r'\{"case".*\}$', line)]
  for case in cases:
    if 'skipped' in case:
      run.skipped += 1
      run.over |= case['skipped'] == 'the time is over'
    elif 'error' in case or (case['case'].startswith(('litmus', 'torch')) and not case['met']):
      run.failed += 1
    else:
      run.passed += 1
      run.unmet += case.get('met') is False
  over = code is None and limit < most
  if code not in (0, 1) and not over:
    run.outcome(False, case=os.path.basename(command[0]), exit=code,
                error='it took too long' if code is None else out[-1500:])
  return cases, over


def litmus(run):
  # 10^6 rounds in each of the six modes on a GPU.
  rounds = '2000' if run.args.quick or not run.on_gpu else '1000000'
  device = ['--device', run.args.device]
  for more, most, kept in ((['--rounds', rounds, '--seconds', '35'], 240.0, 60),
                           # Shows that a lost ordering would be found.
                           (['--rounds', '20000' if run.on_gpu else '2000', '--seconds', '5', '--broken'], 60.0, 5)):
    _, over = own_lines(run, [run.program('gpu_litmus'), *device, *more], most, kept)
    if over:
      run.no_time(case='gpu_litmus', params=' '.join(more))


def sanitize(run):
  sanitizer = find_tool('compute-sanitizer') if run.on_gpu else None
  device = ['--device', run.args.device]
  all_seeds = list(seeds())[:: 31 if run.args.quick else 13]
  programs = [[run.program('gpu_litmus'), *device, '--rounds', '2000', '--seconds', '20']]
  for seed, options in all_seeds:
    small = [o for o in options if o != '--scale'] if '--scale' not in options else \
        options[:options.index('--scale')] + options[options.index('--scale') + 2:]
    programs.append([run.program('oracle_device'), *device, '--first', seed, '--seeds', '1', '--jobs', '1',
                     '--hang-seconds', '200', '--scale', '0.02', *small])
  for program in programs:
    for tool in TOOLS:
      params = {'tool': tool, 'program': ' '.join([os.path.basename(program[0]), *program[1:]])}
      if run.done_before('sanitize', params):
        continue
      if run.left() < 20:
        run.no_time(case='sanitize', params=params)
        continue
      if not sanitizer:
        # The rehearsal runs the programs and uses none of their measurements.
        why = 'no compute-sanitizer' if run.on_gpu else 'the host implementation has no compute-sanitizer'
        code, out = run.call(program, timeout=min(100.0, run.left() - 5))
        if code == 0:
          run.outcome(None, case='sanitize', params=params, skipped=why)
        else:
          run.outcome(False, case='sanitize', params=params, exit=code, error=out[-1500:])
        continue
      began = time.monotonic()
      # Memcheck reports a poll of an event that has not passed yet as an error. The engine itself checks the status of
      # each CUDA call.
      polls = ['--report-api-errors', 'no'] if tool == 'memcheck' else []
      code, out = run.call([sanitizer, '--tool', tool, *polls, '--error-exitcode', '9', '--print-limit', '20',
                            *program], timeout=min(120.0, run.left() - 5))
      summary = re.findall(r'(?:ERROR|RACECHECK) SUMMARY: (.*)', out)
      figures = {'summary': summary[-1] if summary else '', 'seconds': round(time.monotonic() - began, 1)}
      if code is None and run.left() < 10:
        run.no_time(case='sanitize', params=params, figures=figures)
      elif code is None:
        run.outcome(None, case='sanitize', params=params, figures=figures, skipped='took too long')
      elif code == 0 and summary:
        run.outcome(True, case='sanitize', params=params, figures=figures, aim='0 errors')
      else:
        run.outcome(False, case='sanitize', params=params, figures=figures, aim='0 errors', exit=code,
                    error=out[-2500:])


def bench(run):
  plan, done = run.build_folder / 'bench-plan.jsonl', run.build_folder / 'bench-done.jsonl'
  plan.unlink(missing_ok=True)
  done.write_text(''.join(json.dumps(case) + '\n' for case in run.earlier.values()))
  command = [run.program('gpu_bench'), '--device', run.args.device, '--python', run.args.python,
             '--script', str(HERE / 'torch_steps.py'), '--seconds', f'{max(5.0, run.left() - 45):.0f}',
             '--plan', str(plan), '--done', str(done)]
  if run.args.quick:
    command.append('--quick')
  if run.args.only:
    command += ['--only', run.args.only]
  cases, over = own_lines(run, command, LIMIT, 5)
  told = {key_of(case) for case in cases}
  for line in plan.read_text().splitlines() if plan.exists() else []:
    case = json.loads(line)
    if not run.done_before(**case) and over and key_of(case) not in told:
      run.no_time(**case)


def check_torch(run):
  folder = run.build_folder / 'tests/sim' if run.args.device.startswith('sim:') else run.build_folder
  own_lines(run, [run.args.python, str(HERE / 'torch_check.py'), '--device', run.args.device,
                  '--engine', str(folder / 'libfrugal.so'),
                  *(['--quick'] if run.args.quick else [])], LIMIT, 5)


def pack(target):
  """Packs the tree, and prints its size."""
  target = pathlib.Path(target).resolve()
  if output(['git', 'status', '--porcelain', '-uno']):
    print('gpu pack: there are changes that are not committed; they are not in it', file=sys.stderr)
  target.parent.mkdir(parents=True, exist_ok=True)
  subprocess.run(['git', 'archive', '--format=tar.gz', '-o', str(target), 'HEAD'], cwd=ROOT, check=True)
  with tarfile.open(target) as tar:
    unpacked = sum(m.size for m in tar.getmembers())
  size = target.stat().st_size
  print(f'{target}: {size / 2**20:.2f} MiB, unpacked {unpacked / 2**20:.2f} MiB, of at most '
        f'{PACK_LIMIT >> 20} MiB')
  if max(size, unpacked) > PACK_LIMIT:
    sys.exit('gpu pack: too large')
  return target


def rehearse(args):
  """Runs all commands from the packed tree, in a new folder, without packages that a machine with a GPU may lack."""
  folder = ROOT / 'build/gpu-rehearsal'
  shutil.rmtree(folder, ignore_errors=True)
  archive = pack(folder / 'frugal.tar.gz')
  tree, out = folder / 'tree', folder / 'out'
  tree.mkdir()
  with tarfile.open(archive) as tar:
    tar.extractall(tree)
  environment = {**os.environ, 'OUT': str(out), 'FRUGAL_GPU_CMAKE':
                 '-DCMAKE_DISABLE_FIND_PACKAGE_mimalloc=ON -DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON '
                 '-DCMAKE_DISABLE_FIND_PACKAGE_CapnProto=ON'}
  bad = []
  # The second `bench` only has the cases left that could not run.
  names = ('oracle', 'litmus', 'torch', 'sanitize', 'bench', 'bench')
  for name in names:
    command = ['./dev', 'gpu', name, '--device', args.device, '--quick', '--python', args.python]
    began = time.monotonic()
    code = subprocess.run(command, cwd=tree, env=environment, check=False).returncode
    seconds = time.monotonic() - began
    print(f'== {name}: exit {code}, {seconds:.0f} s', flush=True)
    if code != 0 or seconds > 480:
      bad.append(name)
  lines = [json.loads(line) for line in (out / 'gpu-results.jsonl').read_text().splitlines()]
  # Results have to name their commit.
  for line in lines:
    if 'begin' in line and not is_commit(line['commit']):
      bad.append(f'the commit of {line["begin"]}')
  ends = [line for line in lines if 'end' in line]
  if len(ends) == len(names) and (ends[-1]['passed'], ends[-1]['before']) != (0, ends[-2]['passed']):
    bad.append('going on')
  print(f'gpu rehearse: {len(lines)} lines of results, ' + '; '.join(
      f'{e["end"]} {e["passed"]} passed, {e["failed"]} failed, {e["skipped"]} skipped, '
      f'{e["before"]} before, {e["seconds"]} s' for e in ends))
  if bad or len(ends) != len(names):
    print(f'gpu rehearse: failed: {", ".join(bad)}')
    return 1
  return 0


def read_runs(files):
  """A list with [first line, cases, last line or None] of each run."""
  runs = []
  for file in files:
    for text in pathlib.Path(file).read_text().splitlines():
      try:
        line = json.loads(text)
      except json.JSONDecodeError:
        continue  # the incomplete last line of a lost machine
      if 'begin' in line:
        runs.append([line, [], None])
      elif not runs:
        continue  # the beginning of the file is missing
      elif 'end' in line:
        runs[-1][2] = line
      elif 'gpu' in line:
        runs[-1][0].update(line)
      else:
        runs[-1][1].append(line)
  return runs


def record(files):
  """Adds the results in files to docs/gpu-record.md."""

  def cell(value):
    if isinstance(value, dict):
      return ', '.join(f'{k} {v}' for k, v in value.items())
    return str(value).replace('|', '/').replace('\n', ' ')

  out = []
  runs = []
  for begin, cases, end in read_runs(files):
    if not begin['device'].startswith('cuda:'):
      sys.exit(f'gpu record: results of {begin["device"]} are not of a GPU')
    if not any(case['case'] not in ('build', 'device') for case in cases):
      continue  # no case has run
    if not begin.get('gpu') or not is_commit(begin['commit'][:40]):
      sys.exit(f'gpu record: the {begin["begin"]} of {begin["date"]} does not name its GPU and its commit')
    runs.append((begin, cases, end))
    out += ['', f'## {begin["begin"]}, {begin["date"]}', '',
            f'Commit {begin["commit"]}; {begin["gpu"]}, driver {begin["driver"]}, CUDA {begin["cuda"]}, '
            f'{begin["cores"]} cores.' + (' Small sizes (--quick).' if begin['quick'] else ''), '',
            '| case | of | figures | aim | met |', '|---|---|---|---|---|']
    equal = [c for c in cases if c['case'] in ('oracle', 'torch') and c.get('met')]
    if equal:
      figure = next(iter(equal[0]['figures']))
      compared = sum(c['figures'][figure] for c in equal)
      out.append(f'| {equal[0]["case"]} | {len(equal)} | {figure} {compared} | bit for bit | met |')
    for case in cases:
      if case in equal:
        continue
      known = ('case', 'params', 'mode', 'figures', 'aim', 'met', 'error', 'seconds')
      figures = case.get('figures') or {k: v for k, v in case.items() if k not in known}
      if 'error' in case:
        figures = {**figures, 'error': case['error'][-200:]}
      if case['case'] == 'build':
        figures = {**figures, 'seconds': case.get('seconds')}
      met = {True: 'met', False: 'NOT met', None: ''}[case.get('met')]
      out.append(f'| {case["case"]} | {cell(case.get("params", case.get("mode", "")))} | '
                 f'{cell(figures)} | {case.get("aim", "")} | {met} |')
    out += ['', 'Cut off before its end.' if end is None else
            f'{end["passed"]} passed, {end["failed"]} failed, {end["skipped"]} skipped, '
            f'{end["before"]} done before, {end["seconds"]} s.']
  if not runs:
    sys.exit('gpu record: no results')
  page = ROOT / 'docs/gpu-record.md'
  text = page.read_text().replace('**Not run on a GPU yet.**\n\n', '')
  page.write_text(text.rstrip('\n') + '\n' + '\n'.join(out) + '\n')
  print(f'{page}: {len(runs)} runs added')
  return 0


def main():
  parser = argparse.ArgumentParser(prog='./dev gpu')
  parser.add_argument('command', choices=['oracle', 'litmus', 'torch', 'sanitize', 'bench', 'pack',
                                          'rehearse', 'record'])
  parser.add_argument('files', nargs='*', help='pack: the archive; record: results')
  parser.add_argument('--device', help='cuda:N or sim:N')
  parser.add_argument('--quick', action='store_true')
  parser.add_argument('--only', help='bench: cases with this text')
  parser.add_argument('--python', default=sys.executable, help='bench and torch: where torch may be')
  parser.add_argument('--commit', help='the commit of the results, where there is no git')
  parser.add_argument('--done', action='append', default=[], metavar='FILE',
                      help='results of earlier runs: their cases do not run again')
  parser.add_argument('--again', action='store_true', help='also run cases that have results')
  args = parser.parse_args()
  if os.sep in args.python:
    # Programs run in other folders. Links are kept: a virtual environment's python is one.
    args.python = os.path.abspath(args.python)
  if args.commit and not is_commit(args.commit):
    parser.error('a commit is 40 hexadecimal digits')
  if args.device is None:
    args.device = 'sim:0' if args.command == 'rehearse' else 'cuda:0'
  if not re.fullmatch(r'(cuda|sim):\d', args.device):
    parser.error('a device is cuda:N or sim:N')
  if args.command == 'pack':
    pack(args.files[0] if args.files else ROOT / 'build/frugal-gpu.tar.gz')
    return 0
  if args.command == 'rehearse':
    return rehearse(args)
  if args.command == 'record':
    return record(args.files)
  if args.device.startswith('cuda:') and not is_commit(commit(args.commit)[:40]):
    sys.exit(f'gpu {args.command}: which commit is this? Neither git nor {HERE}/commit has it. Name it with '
             '--commit $(git rev-parse HEAD) of the tree that this is a copy of, or unpack what '
             './dev gpu pack makes, which has it.')
  for file in args.done:
    if not os.access(file, os.R_OK):
      parser.error(f'cannot read {file}')
  run = Run(args)
  if run.build() and run.open():
    {'oracle': oracle, 'litmus': litmus, 'torch': check_torch, 'sanitize': sanitize,
     'bench': bench}[args.command](run)
  return run.end()


if __name__ == '__main__':
  sys.exit(main())
