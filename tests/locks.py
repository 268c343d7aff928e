"""Every mutex of lib/ is in the lock table of docs/architecture.md, and every lock of the table is in lib/.

    locks.py SOURCE_FOLDER
"""

import pathlib
import re
import sys

MUTEX = r'(?:(?:Control|Urgent|Timed)?Mutex|SpinLock|std::(?:shared_|recursive_|timed_)?mutex)'
TOKEN = re.compile(r'\b(?:class|struct)\s+(?:[A-Z_]{3,}(?:\([^)]*\))?\s+)*(?P<scope>[\w:]+)\s*(?:final\s*)?'
                   r'(?::[^;{}()]*)?\{|(?P<open>\{)|(?P<close>\})|'
                   r'\b' + MUTEX + r'\s+(?P<names>\w+(?:\[\w+\])?(?:\s*,\s*\w+)*)\s*[;={]')
NOISE = re.compile(r'//[^\n]*|/\*.*?\*/|^[ \t]*#[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|'
                   r'\b(?:ACQUIRED_(?:BEFORE|AFTER)|GUARDED_BY)\([^()]*\)', re.S | re.M)


def locks_of(text):
  scopes = []
  for token in TOKEN.finditer(NOISE.sub('', text)):
    if token['close']:
      scopes = scopes[:-1]
    elif not token['names']:
      scopes.append(token['scope'])
    elif not scopes or not (scopes[-1] or '').endswith('Mutex'):  # a class of mutexes has a mutex itself
      for name in re.findall(r'\w+', token['names']):
        yield '::'.join([scope for scope in scopes if scope] + [name])


source = pathlib.Path(sys.argv[1])
files = [f for f in sorted((source / 'lib').rglob('*')) if f.suffix in ('.h', '.cpp', '.inc', '.cu')]
there = {lock: f for f in files for lock in locks_of(f.read_text())}
section = (source / 'docs/architecture.md').read_text().split('\n## Locks\n')[1].split('\n## ')[0]
rows = [line.split('|')[1] for line in section.splitlines() if line.startswith('|') and '*No mutexes' not in line]
told = {name for row in rows for name in re.findall(r'`([\w:]+)`', row)}
wrong = [f'{there[n].relative_to(source)}: {n} is not in the lock table' for n in sorted(set(there) - told)]
wrong += [f'docs/architecture.md: lib has no lock {n}' for n in sorted(told - set(there))]
print('\n'.join(wrong) or f'{len(there)} locks are in the table')
sys.exit(1 if wrong or not there else 0)
