"""./dev gpu continues where it stopped, and its results name their commit and GPU. Other programs replace those that
need a GPU.

    run_test.py
"""

import contextlib
import io
import json
import os
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

import run

HASH = 'a1' * 20
LITMUS = '''#!/bin/sh
echo "$CUDA_DEVICE_ORDER" >"${0%/*}/order"
echo '{"gpu": "NVIDIA of tests", "compute": 90}'
'''
# For a GPU that has number 2 on the bus.
NVIDIA_SMI = '''#!/bin/sh
test "$*" = '--id=2 --query-gpu=compute_cap --format=csv,noheader' && echo 9.0
'''
# One case with a result, one that cannot be run, one that fails, and one that takes too long.
BENCH = r'''#!/usr/bin/env python3
import json, sys, time
value = lambda name: sys.argv[sys.argv.index(name) + 1]
done = open(value('--done')).read().splitlines()
cases = [{'case': name, 'params': {'hits': 0.25}} for name in ('quick', 'torch', 'failing', 'slow')]
open(value('--plan'), 'w').writelines(json.dumps(c) + '\n' for c in [*cases, {**cases[3], 'params': {}}])
for case in cases:
  begin = json.dumps(case)[:-1]
  if any(line.startswith(begin + ', ') for line in done):
    continue
  if case['case'] == 'slow':
    time.sleep(60)
  more = {'quick': '"figures": {"us": 3}, "aim": "us >= 5", "met": false', 'torch': '"skipped": "no torch"',
          'failing': '"error": "an error"'}[case['case']]
  with open(value('--results'), 'a') as f:
    f.write(begin + ', ' + more + '}\n')
  print(begin + ', ' + more + '}', flush=True)
'''


class RunTest(unittest.TestCase):

  def setUp(self):
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.root = pathlib.Path(folder.name)
    (self.root / 'tools/gpu').mkdir(parents=True)
    (self.root / 'tools/gpu/commit').write_text('$' + 'Format:%H$\n')
    (self.root / 'docs').mkdir()
    (self.root / 'docs/gpu-record.md').write_text('# Record\n\n**Not run on a GPU yet.**\n\nText.\n')
    programs = self.root / 'build/gpu-native/tools/gpu'
    programs.mkdir(parents=True)
    for name, text in (('gpu_litmus', LITMUS), ('gpu_bench', BENCH)):
      (programs / name).write_text(text)
      (programs / name).chmod(0o755)
    self.results = self.root / 'out/gpu-results.jsonl'
    for patch in (mock.patch.object(run, 'ROOT', self.root), mock.patch.object(run, 'LIMIT', 12.0),
                  mock.patch.object(run.Run, 'build', lambda _: True),
                  # Nor nvidia-smi, nor git of the folder above.
                  mock.patch.dict(os.environ, OUT=str(self.root / 'out'), PATH='/usr/bin:/bin',
                                  GIT_CEILING_DIRECTORIES=str(self.root))):
      patch.start()
      self.addCleanup(patch.stop)

  def gpu(self, *arguments):
    """(exit status, what was printed)"""
    text = io.StringIO()
    with mock.patch.object(sys, 'argv', ['gpu', *arguments]), contextlib.redirect_stderr(text), \
        contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())) as out:
      try:
        code = run.main()
      except SystemExit as e:
        code = e.code
      out.flush()
      return code, text.getvalue() + out.buffer.getvalue().decode()

  def lines(self):
    return [json.loads(line) for line in self.results.read_text().splitlines()]

  def test_commit(self):
    code, _ = self.gpu('bench')
    self.assertIn('--commit', code)
    self.assertFalse(self.results.exists())
    self.assertEqual(self.gpu('bench', '--commit', 'main')[0], 2)
    (self.root / 'tools/gpu/commit').write_text(HASH + '\n')
    self.assertEqual(run.commit(None), HASH)
    (self.root / '.git').write_text('gitdir: /nowhere\n')  # a work tree that was copied
    self.assertEqual(run.commit(None), HASH)

  def test_which_gpu(self):
    (self.root / 'nvidia-smi').write_text(NVIDIA_SMI)
    (self.root / 'nvidia-smi').chmod(0o755)
    with mock.patch.dict(os.environ, PATH=f'{self.root}:/usr/bin:/bin'):
      for visible, right in (('', 2), ('2', 0), ('3, 2', 1), ('0,1,2', 2), ('GPU-2a,GPU-0b', 2)):
        with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=visible):
          found = [n for n in range(4) if run.architecture(f'cuda:{n}') == '90']
          self.assertEqual(found, [right], visible)
    # What is started numbers GPUs as nvidia-smi does.
    bench = self.root / 'build/gpu-native/tools/gpu/gpu_bench'
    bench.write_text(BENCH.replace("('quick', 'torch', 'failing', 'slow')", "('quick', 'torch')")
                     .replace("cases[3]", "cases[1]"))
    with mock.patch.dict(os.environ, CUDA_DEVICE_ORDER='FASTEST_FIRST'):
      self.assertEqual(self.gpu('bench', '--commit', HASH)[0], 0)
    self.assertEqual((bench.parent / 'order').read_text(), 'PCI_BUS_ID\n')

  def test_going_on(self):
    code, _ = self.gpu('bench', '--commit', HASH)
    first = self.lines()
    self.assertEqual(code, 1)  # `failing`
    self.assertEqual([c.get('skipped') for c in first if c.get('case') == 'slow'], ['the time is over'] * 2)
    end = first[-1]
    self.assertEqual([end[k] for k in ('passed', 'failed', 'skipped', 'unmet', 'before')], [1, 1, 3, 1, 0])

    def names(*more):
      self.results.write_text(''.join(json.dumps(line) + '\n' for line in first))
      self.gpu('bench', *more)
      return [c['case'] for c in self.lines()[len(first):] if 'case' in c], self.lines()[-1]['before']

    rest = ['torch', 'failing', 'slow', 'slow']
    self.assertEqual(names('--commit', HASH), (rest, 1))
    for more in (['--commit', 'b2' * 20], ['--commit', HASH, '--quick'], ['--commit', HASH, '--again']):
      self.assertEqual(names(*more), (['quick', *rest], 0))

  def test_done_elsewhere(self):
    self.gpu('bench', '--commit', HASH)
    elsewhere = self.root / 'elsewhere.jsonl'
    # The machine went away in the middle of a line.
    elsewhere.write_text(self.results.read_text() + '{"case": "qui')
    self.results.unlink()
    self.gpu('bench', '--commit', HASH, '--done', str(elsewhere))
    self.assertEqual(self.lines()[-1]['before'], 1)
    text = elsewhere.read_text().replace('NVIDIA of tests', 'another one')
    elsewhere.write_text(text)
    self.results.unlink()
    self.gpu('bench', '--commit', HASH, '--done', str(elsewhere))
    self.assertEqual(self.lines()[-1]['before'], 0)
    self.assertEqual(self.gpu('bench', '--commit', HASH, '--done', 'nowhere')[0], 2)

  def test_nothing_left(self):
    bench = self.root / 'build/gpu-native/tools/gpu/gpu_bench'
    bench.write_text(BENCH.replace("('quick', 'torch', 'failing', 'slow')", "('quick', 'torch')")
                     .replace("cases[3]", "cases[1]"))
    self.assertEqual([self.gpu('bench', '--commit', HASH)[0] for _ in range(2)], [0, 0])
    self.assertEqual(self.lines()[-1]['before'], 1)

  def test_record(self):
    self.gpu('bench', '--commit', HASH)
    text = self.results.read_text()
    # A run that did not come to its first case has no results.
    self.results.write_text(text + json.dumps({'begin': 'litmus', 'device': 'cuda:0'}) + '\n')
    self.assertEqual(self.gpu('record', str(self.results))[0], 0)
    page = (self.root / 'docs/gpu-record.md').read_text()
    self.assertIn(f'Commit {HASH}; NVIDIA of tests, driver', page)
    self.assertNotIn('Not run on a GPU yet', page)
    self.assertNotIn('## litmus', page)
    for old, new in ((HASH, 'unknown'), ('NVIDIA of tests', ''), ('cuda:0', 'sim:0')):
      self.results.write_text(text.replace(old, new))
      self.assertIn('gpu record:', str(self.gpu('record', str(self.results))[0]))

  def test_python(self):
    with mock.patch.object(run, 'rehearse', lambda args: args.python):
      self.assertEqual(self.gpu('rehearse', '--python', 'venv/bin/python')[0], os.path.abspath('venv/bin/python'))
      self.assertEqual(self.gpu('rehearse', '--python', 'python3')[0], 'python3')


if __name__ == '__main__':
  unittest.main()
