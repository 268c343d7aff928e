"""./dev gpu: everything that needs a GPU, and its rehearsal without one.

What runs is built from this folder alone, with CMake, ninja, a C++ compiler and, for cuda:N, nvcc. Each
command ends within 8 minutes, its build included, and adds a line of JSON to gpu-results.jsonl after every
case, in $OUT or build/gpu-results: a run that is cut off has kept what it has found.
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
  """One command: its clock, its results, its counts."""

  def __init__(self, args):
    self.args = args
    self.start = time.monotonic()
    self.passed = self.failed = self.skipped = self.unmet = 0
    folder = pathlib.Path(os.environ.get('OUT') or ROOT / 'build/gpu-results')
    folder.mkdir(parents=True, exist_ok=True)
    self.results = folder / 'gpu-results.jsonl'
    self.on_gpu = args.device.startswith('cuda:')
    self.build_folder = ROOT / 'build' / ('gpu-native' if self.on_gpu else 'gpu-sim')
    self.logs = ROOT / 'build/logs'
    self.logs.mkdir(parents=True, exist_ok=True)
    self.line(begin=args.command, commit=commit(args.commit), device=args.device, quick=args.quick,
              date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
              cores=os.cpu_count(), **(gpu_facts(args.device) if self.on_gpu else {}))

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
    """A case of ours: True, False, or None for one that could not be run."""
    if met is None:
      self.skipped += 1
    elif met:
      self.passed += 1
    else:
      self.failed += 1
    self.line(**fields, met=met)

  def program(self, name):
    return str(self.build_folder / 'tools/gpu' / name)

  def build(self):
    began = time.monotonic()
    options = ['-DCMAKE_BUILD_TYPE=Release', '-DFRUGAL_GPU_TOOLS=ON', '-DFRUGAL_TESTS=OFF',
               '-DFRUGAL_BENCH=OFF', '-DFRUGAL_EXAMPLES=OFF', '-DFRUGAL_TOOLS=OFF',
               f'-DFRUGAL_CUDA={"ON" if self.on_gpu else "OFF"}']
    if self.on_gpu:
      options.append(f'-DCMAKE_CUDA_ARCHITECTURES={architecture()}')
      if os.environ.get('CUDACXX'):
        options.append(f'-DCMAKE_CUDA_COMPILER={os.environ["CUDACXX"]}')
    options += shlex.split(os.environ.get('FRUGAL_GPU_CMAKE', ''))
    commands = [['cmake', '-S', '.', '-B', str(self.build_folder), '-G', 'Ninja', *options],
                ['cmake', '--build', str(self.build_folder), '--target', 'gpu_tools']]
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

  def call(self, command, log=None, timeout=None, echo=False):
    """(exit status or None if the time was over, output)."""
    try:
      # In a group of its own: killed with all that it has started.
      process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, start_new_session=True)
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
              seconds=round(time.monotonic() - self.start, 1))
    print(f'gpu {self.args.command} on {self.args.device}: {self.passed} passed, {self.failed} failed, '
          f'{self.skipped} skipped, {self.unmet} aims not met, {time.monotonic() - self.start:.0f} s; results: {self.results}')
    # On a GPU something must have been run.
    return 0 if self.failed == 0 and self.passed + (0 if self.on_gpu else self.skipped) > 0 else 1


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


def nvidia_smi(device, fields):
  return output(['nvidia-smi', f'--id={device.split(":")[1]}', f'--query-gpu={fields}',
                 '--format=csv,noheader'])


def gpu_facts(device):
  name, _, driver = nvidia_smi(device, 'name,driver_version').partition(', ')
  nvcc = re.search(r'release ([\d.]+)', output([find_tool('nvcc') or 'nvcc', '--version']))
  return {'gpu': name, 'driver': driver, 'cuda': nvcc.group(1) if nvcc else ''}


def architecture():
  """What CMake takes as the architecture: that of the first GPU."""
  capability = output(['nvidia-smi', '--id=0', '--query-gpu=compute_cap', '--format=csv,noheader'])
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
    if run.left() < 15:
      run.outcome(None, case='oracle', params=params, skipped='the time is over')
      continue
    began = time.monotonic()
    code, out = run.call([run.program('oracle_device'), '--device', run.args.device, '--first', seed,
                          '--seeds', '1', '--jobs', '1', '--hang-seconds', '100', *options],
                         timeout=min(120.0, run.left() - 5))
    found = re.search(r'oracle: (\d+) passed, (\d+) failed', out)
    rows = re.search(r'rows compared\s+(\d+)', out)
    met = (code == 0 and found is not None and int(found.group(1)) == 1 and rows is not None
           and int(rows.group(1)) > 0)
    facts = {} if met else {'exit': code, 'error': out[-1500:]}
    run.outcome(met, case='oracle', params=params, aim='bit for bit',
                figures={'rows_compared': int(rows.group(1)) if rows else 0,
                         'seconds': round(time.monotonic() - began, 2)}, **facts)


def own_lines(run, command, timeout):
  """A program that writes its lines into the results itself."""
  code, out = run.call([*command, '--results', str(run.results)], timeout=timeout, echo=True)
  for line in out.splitlines():
    if not line.startswith('{"case"'):
      continue
    case = json.loads(line)
    if 'skipped' in case:
      run.skipped += 1
    elif 'error' in case or (case['case'].startswith('litmus') and not case['met']):
      run.failed += 1
    else:
      run.passed += 1
      run.unmet += case.get('met') is False
  if code not in (0, 1):
    run.outcome(False, case=os.path.basename(command[0]), exit=code,
                error='the time was over' if code is None else out[-1500:])


def litmus(run):
  # About 10^6 rounds in each of the six modes on a GPU.
  rounds = '2000' if run.args.quick or not run.on_gpu else '1000000'
  device = ['--device', run.args.device]
  own_lines(run, [run.program('gpu_litmus'), *device, '--rounds', rounds, '--seconds', '25'],
            min(240.0, run.left() - 60))
  # That a lost ordering would be seen.
  own_lines(run, [run.program('gpu_litmus'), *device, '--rounds', '20000' if run.on_gpu else '2000',
                  '--seconds', '5', '--broken'], min(60.0, run.left() - 5))


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
      if not sanitizer:
        # The rehearsal runs the programs, and nothing that is measured by them is claimed.
        why = 'no compute-sanitizer' if run.on_gpu else 'the host implementation has no compute-sanitizer'
        code, out = run.call(program, timeout=min(100.0, run.left() - 5))
        if code == 0:
          run.outcome(None, case='sanitize', params=params, skipped=why)
        else:
          run.outcome(False, case='sanitize', params=params, exit=code, error=out[-1500:])
        continue
      if run.left() < 20:
        run.outcome(None, case='sanitize', params=params, skipped='the time is over')
        continue
      began = time.monotonic()
      code, out = run.call([sanitizer, '--tool', tool, '--error-exitcode', '9', '--print-limit', '20',
                            *program], timeout=min(120.0, run.left() - 5))
      summary = re.findall(r'(?:ERROR|RACECHECK) SUMMARY: (.*)', out)
      figures = {'summary': summary[-1] if summary else '', 'seconds': round(time.monotonic() - began, 1)}
      if code is None:
        run.outcome(None, case='sanitize', params=params, figures=figures, skipped='took too long')
      elif code == 0 and summary:
        run.outcome(True, case='sanitize', params=params, figures=figures, aim='0 errors')
      else:
        run.outcome(False, case='sanitize', params=params, figures=figures, aim='0 errors', exit=code,
                    error=out[-2500:])


def bench(run):
  command = [run.program('gpu_bench'), '--device', run.args.device, '--python', run.args.python,
             '--script', str(HERE / 'torch_steps.py'), '--seconds', f'{max(5.0, run.left() - 45):.0f}']
  if run.args.quick:
    command.append('--quick')
  if run.args.only:
    command += ['--only', run.args.only]
  own_lines(run, command, run.left() - 5)


def pack(target):
  """The packed tree, and its size."""
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
  """All four from the packed tree, in a fresh folder, without what a machine with a GPU may lack."""
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
  for name in ('oracle', 'litmus', 'sanitize', 'bench'):
    command = ['./dev', 'gpu', name, '--device', args.device, '--quick', '--python', args.python]
    began = time.monotonic()
    code = subprocess.run(command, cwd=tree, env=environment, check=False).returncode
    seconds = time.monotonic() - began
    print(f'== {name}: exit {code}, {seconds:.0f} s', flush=True)
    if code != 0 or seconds > 480:
      bad.append(name)
  lines = [json.loads(line) for line in (out / 'gpu-results.jsonl').read_text().splitlines()]
  # Whoever reads the results must be able to tell what they are of.
  for line in lines:
    if 'begin' in line and not re.fullmatch('[0-9a-f]{40}', line['commit']):
      bad.append(f'the commit of {line["begin"]}')
  ends = [line for line in lines if 'end' in line]
  print(f'gpu rehearse: {len(lines)} lines of results, ' + '; '.join(
      f'{e["end"]} {e["passed"]} passed, {e["failed"]} failed, {e["skipped"]} skipped, {e["seconds"]} s'
      for e in ends))
  if bad or len(ends) != 4:
    print(f'gpu rehearse: failed: {", ".join(bad)}')
    return 1
  return 0


def read_runs(files):
  """[the line that began it, its cases, the line that ended it or None]."""
  runs = []
  for file in files:
    for text in pathlib.Path(file).read_text().splitlines():
      try:
        line = json.loads(text)
      except json.JSONDecodeError:
        continue  # the last line of a machine that went away
      if 'begin' in line:
        runs.append([line, [], None])
      elif 'end' in line:
        runs[-1][2] = line
      else:
        runs[-1][1].append(line)
  return runs


def record(files):
  """Adds what results files tell to docs/gpu-record.md."""

  def cell(value):
    if isinstance(value, dict):
      return ', '.join(f'{k} {v}' for k, v in value.items())
    return str(value).replace('|', '/').replace('\n', ' ')

  out = []
  runs = read_runs(files)
  for begin, cases, end in runs:
    if not begin['device'].startswith('cuda:') or not begin.get('gpu'):
      sys.exit(f'gpu record: results of {begin["device"]} are not of a GPU')
    out += ['', f'## {begin["begin"]}, {begin["date"]}', '',
            f'Commit {begin["commit"]}; {begin["gpu"]}, driver {begin["driver"]}, CUDA {begin["cuda"]}, '
            f'{begin["cores"]} cores.' + (' Small sizes (--quick).' if begin['quick'] else ''), '',
            '| case | of | figures | aim | met |', '|---|---|---|---|---|']
    equal = [c for c in cases if c['case'] == 'oracle' and c['met']]
    if equal:
      rows = sum(c['figures']['rows_compared'] for c in equal)
      out.append(f'| oracle | {len(equal)} seeds | rows compared {rows} | bit for bit | met |')
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
            f'{end["passed"]} passed, {end["failed"]} failed, {end["skipped"]} skipped, {end["seconds"]} s.']
  if not runs:
    sys.exit('gpu record: no results')
  page = ROOT / 'docs/gpu-record.md'
  text = page.read_text().replace('**Not run on a GPU yet.**\n\n', '')
  page.write_text(text.rstrip('\n') + '\n' + '\n'.join(out) + '\n')
  print(f'{page}: {len(runs)} runs added')
  return 0


def main():
  parser = argparse.ArgumentParser(prog='./dev gpu')
  parser.add_argument('command', choices=['oracle', 'litmus', 'sanitize', 'bench', 'pack', 'rehearse',
                                          'record'])
  parser.add_argument('files', nargs='*', help='pack: the archive; record: results')
  parser.add_argument('--device', help='cuda:N or sim:N')
  parser.add_argument('--quick', action='store_true')
  parser.add_argument('--only', help='bench: cases with this text')
  parser.add_argument('--python', default=sys.executable, help='bench: where torch may be')
  parser.add_argument('--commit', help='what the results are of, where there is no git')
  args = parser.parse_args()
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
  run = Run(args)
  if run.build():
    {'oracle': oracle, 'litmus': litmus, 'sanitize': sanitize, 'bench': bench}[args.command](run)
  return run.end()


if __name__ == '__main__':
  sys.exit(main())
