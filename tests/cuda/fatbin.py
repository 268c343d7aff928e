"""Checks nvcc's code of the kernels, without a GPU.

    fatbin.py CUOBJDUMP FILE registers BUDGET   registers and stack of every kernel, on every
                                                architecture in FILE, are within the budget
    fatbin.py CUOBJDUMP FILE ptx BUDGET         the PTX has the right loads and the right
                                                arithmetic; FILE is a library, an object or PTX
    fatbin.py CUOBJDUMP FILE kernels LIST OUT   every architecture has the kernels of LIST and no
                                                others; OUT gets their names

Each line of BUDGET is a kernel's name, the registers that a thread may use at most, and the 16-byte
accesses to global memory that its loops must have: `load`, `load+store`, or `-`. Kernels are called
frugal_NAME in FILE. The program prints every complaint. The exit status is 1 if there is one, 77
(skipped) if FILE has no PTX.
"""

import re
import subprocess
import sys

PREFIX = 'frugal_'

FLOATS = r'\b(f16|f16x2|bf16|bf16x2|f32|f32x2|f64)\b'

# An instruction that a kernel must not have, and why.
FORBIDDEN = [
    (r'\b(fma|mad)\.[\w.:]*' + FLOATS, 'a fused multiply-add: other bits than on the host'),
    # Only in this form: the `add` of an atomic instruction follows a dot.
    (r'(?<![\w.])(add|sub|mul|div|sqrt)\.(?![\w.:]*\brn\b)[\w.:]*' + FLOATS,
     'not rounded here (.rn): the driver may fuse it, or round otherwise'),
    (r'\.ftz\b', 'denormals become zeros: other bits than on the host'),
    (r'\.(approx|full)\b', 'not the IEEE result: other bits than on the host'),
    (r'\b(ld\.global(\.\w+)*\.nc|ldu|tex|tld4)\b',
     'a load through the read-only cache: host rows change between kernels'),
    (r'\b(atom|red)\.([\w.:]+\.)?sys\b',
     'an atomic of system scope: nothing on the device modifies host memory'),
    (r'\b(ld|st|atom|red)\.(?!([\w.]+\.)?(param|global|shared|const)\b)',
     'a generic or local access: simt.h makes global and shared ones'),
    (r'\b(ld|st)\.([\w.]+\.)?local\b', 'an access to local memory'),
    (r'\bcall\b', 'a call: bodies are inlined'),
]

VECTOR = r'\b{}\.([\w.:]+\.)?global\.([\w.:]+\.)?(v4\.[fbus]32|v2\.[fbus]64|v8\.[fbus]32|[b]128)\b'


def fail(*complaints):
  for complaint in complaints:
    print(complaint, file=sys.stderr)
  sys.exit(1 if complaints else 0)


def run(*command):
  result = subprocess.run(command, capture_output=True, text=True, check=False)
  if result.returncode != 0:
    fail(f'{" ".join(command)}: {result.stderr.strip()}')
  return result.stdout


def read_budget(path):
  """{kernel: (registers, accesses)}"""
  budget = {}
  with open(path, encoding='utf-8') as f:
    for number, line in enumerate(f, 1):
      words = line.split('#')[0].split()
      if not words:
        continue
      if (len(words) != 3 or words[2] not in ('load', 'load+store', '-') or
          not words[1].isdecimal() or words[0] in budget):
        fail(f'{path}:{number}: wanted a new kernel, registers, and load, load+store or -')
      budget[words[0]] = (int(words[1]), words[2])
  return budget


def usage_of(cuobjdump, path):
  """{architecture: {symbol: {'REG': .., 'STACK': .., 'LOCAL': ..}}} of a file's machine code."""
  usage, functions, symbol = {}, None, None
  for line in run(cuobjdump, '--dump-resource-usage', path).splitlines():
    words = line.split()
    if line.startswith('Fatbin'):
      functions = None
    elif line.startswith('arch ='):
      arch = words[2]
    elif line.startswith('Resource usage'):
      functions = usage.setdefault(arch, {})
    elif words[:1] == ['Function'] and functions is not None:
      symbol = words[1].rstrip(':')
    elif words and words[0].startswith('REG:') and symbol:
      functions[symbol] = {k: int(v) for k, v in
                           (w.rsplit(':', 1) for w in words) if k in ('REG', 'STACK', 'LOCAL')}
      symbol = None
  if not any(usage.values()):
    fail(f'{path} has no kernels')
  return usage


def name_of(symbol):
  return symbol[len(PREFIX):] if symbol.startswith(PREFIX) else symbol


def check_registers(usage, budget):
  complaints = []
  print(f'{"registers":24s}' + ''.join(f'{arch:>8s}' for arch in usage) + '  budget')
  names = sorted({name_of(s) for functions in usage.values() for s in functions})
  for name in names:
    row = [functions.get(PREFIX + name, functions.get(name)) for functions in usage.values()]
    print(f'{name:24s}' + ''.join(f'{u["REG"] if u else "-":>8}' for u in row) +
          f'{budget[name][0] if name in budget else "none":>8}')
  for name in names:
    used = {arch: functions.get(PREFIX + name, functions.get(name))
            for arch, functions in usage.items()}
    used = {arch: u for arch, u in used.items() if u}
    if name not in budget:
      complaints.append(f'{name}: has no budget')
      continue
    over = [f'{u["REG"]} on {arch}' for arch, u in used.items() if u['REG'] > budget[name][0]]
    if over:
      complaints.append(f'{name}: registers: {", ".join(over)}; budget {budget[name][0]}')
    stack = [f'{u["STACK"] + u["LOCAL"]} on {arch}' for arch, u in used.items()
             if u['STACK'] or u['LOCAL']]
    if stack:
      complaints.append(f'{name}: bytes of stack: {", ".join(stack)}: registers are spilled, or an '
                        'array is indexed')
  complaints += [f'{name}: has a budget, but is no kernel' for name in budget if name not in names]
  return complaints


def ptx_of(cuobjdump, path):
  if path.endswith('.ptx'):
    with open(path, encoding='utf-8') as f:
      return f.read()
  return run(cuobjdump, '-ptx', path)


def check_ptx(text, budget):
  """Complaints; None if there is no PTX."""
  text = re.sub(r'//[^\n]*|/\*.*?\*/', '', text, flags=re.S)
  entries = re.findall(r'\.entry\s+(\w+)\s*\(.*?\)[^{;]*\{(.*?)^\s*\}\s*$', text, flags=re.S | re.M)
  if not entries:
    return None
  complaints = []
  for symbol, body in entries:
    name = name_of(symbol)
    for line in body.splitlines():
      for pattern, why in FORBIDDEN:
        if re.search(pattern, line):
          complaints.append(f'{name}: {" ".join(line.split())}: {why}')
    if name not in budget:
      complaints.append(f'{name}: is not in the list')
      continue
    wanted = {'-': [], 'load': ['ld'], 'load+store': ['ld', 'st']}[budget[name][1]]
    for access in wanted:
      if not re.search(VECTOR.format(access), body):
        complaints.append(f'{name}: no 16-byte {access}.global')
  found = {name_of(symbol) for symbol, _ in entries}
  complaints += [f'{name}: is not in the PTX' for name in budget if name not in found]
  if not complaints:
    print(f'{len(entries)} kernels, {sum(len(b.splitlines()) for _, b in entries)} lines of PTX')
  return complaints


def check_kernels(usage, names):
  found = {arch: {name_of(symbol) for symbol in functions} for arch, functions in usage.items()}
  complaints = []
  for name in sorted(names.union(*found.values())):
    archs = ', '.join(arch for arch in usage if (name in found[arch]) != (name in names))
    if archs:
      complaints.append(f'{name}: not in the code for {archs}' if name in names else
                        f'{name}: not in the list of kernels, but in the code for {archs}')
  return complaints


def main():
  cuobjdump, path, what = sys.argv[1:4]
  if what == 'registers':
    fail(*check_registers(usage_of(cuobjdump, path), read_budget(sys.argv[4])))
  elif what == 'ptx':
    complaints = check_ptx(ptx_of(cuobjdump, path), read_budget(sys.argv[4]))
    if complaints is None:
      print(f'{path} has no PTX')
      sys.exit(77)
    fail(*complaints)
  elif what == 'kernels':
    usage = usage_of(cuobjdump, path)
    with open(sys.argv[4], encoding='utf-8') as f:
      names = set(f.read().split())
    with open(sys.argv[5], 'w', encoding='utf-8') as f:
      f.writelines(f'{name}\n' for name in
                   sorted({name_of(s) for functions in usage.values() for s in functions}))
    complaints = check_kernels(usage, names)
    if not complaints:
      print(f'{len(names)} kernels for each of {", ".join(usage)}')
    fail(*complaints)
  else:
    sys.exit(__doc__)


if __name__ == '__main__':
  main()
