"""Carries the mutants' patches over a change of the files that they change.

    tests/mutants/renew.py OLD_REV

A patch that does not apply to the files as they are now is made anew: the mutated files of OLD_REV are merged with the
present ones, and the difference replaces the patch's hunks. Its head stays. A file that git finds under another name
now is followed. A merge that conflicts, or that leaves no difference, is named and left to be done by hand.
"""

import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
APPLY = ['patch', '-p1', '-s', '-f', '-F', '0']


def output(*command, stdin=None, accept=(0,)):
  done = subprocess.run(command, input=stdin, capture_output=True, text=True)
  if done.returncode not in accept:
    raise RuntimeError(done.stderr or done.stdout)
  return done.stdout


def applies(name):
  return subprocess.run([*APPLY, '--dry-run', '-i', f'{HERE}/{name}'], capture_output=True).returncode == 0


def write(folder, name, text):
  path = os.path.join(folder, name)
  os.makedirs(os.path.dirname(path), exist_ok=True)
  with open(path, 'w', encoding='utf-8') as f:
    f.write(text)
  return path


def renewed(old_rev, patch, moved):
  """The text of `patch` for the present files."""
  with open(os.path.join(HERE, patch), encoding='utf-8') as f:
    head = ''.join(row for row in f if row.startswith('#'))
  old_patch = output('git', 'show', f'{old_rev}:tests/mutants/{patch}')
  names = [row[len('+++ b/'):].rstrip() for row in old_patch.split('\n') if row.startswith('+++ b/')]
  with tempfile.TemporaryDirectory() as folder:
    mutated = os.path.join(folder, 'mutated')
    olds = {name: output('git', 'show', f'{old_rev}:{name}') for name in names}
    for name, text in olds.items():
      write(mutated, name, text)
    output(*APPLY, '-d', mutated, stdin=old_patch)
    hunks = ''
    for name, text in olds.items():
      now, path = moved.get(name, name), os.path.join(mutated, name)
      output('git', 'merge-file', '-q', path, write(folder, 'old', text), now)
      hunks += output('diff', '-U2', '--label', f'a/{now}', '--label', f'b/{now}', now, path, accept=(0, 1))
  if not hunks:
    raise RuntimeError('nothing is left of it')
  return head + hunks


def main(old_rev):
  os.chdir(ROOT)
  status = [row.split('\t') for row in output('git', 'diff', '-M', '--name-status', old_rev).splitlines()]
  moved = {row[1]: row[2] for row in status if row[0].startswith('R')}
  wrong = 0
  for name in sorted(os.listdir(HERE)):
    patch = os.path.join(HERE, name)
    if not name.endswith('.patch') or applies(name):
      continue
    try:
      write(HERE, name, renewed(old_rev, name, moved))
      print(f'{name}: renewed')
    except (RuntimeError, OSError) as e:
      wrong = 1
      print(f'{name}: by hand: {str(e) or "conflict"}')
  return wrong


if __name__ == '__main__':
  sys.exit(main(*sys.argv[1:]) if len(sys.argv) == 2 else __doc__)
