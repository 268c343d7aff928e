#!/usr/bin/env python3
"""frugal-top on texts of frugal_metrics: what it computes from one text and from two, and what it refuses.

    top_test.py PROGRAM [LIBRARY]    with a library: also on the metrics of its engine
"""
import ctypes
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

PROGRAM = sys.argv.pop(1)
LIBRARY = sys.argv.pop(1) if len(sys.argv) > 1 else None
SOURCE = pathlib.Path(__file__).with_name('frugal_top.cpp')

FIRST = r'''# HELP frugal_steps_committed_total Steps that all ranks have ended.
# TYPE frugal_steps_committed_total counter
frugal_steps_committed_total 50
frugal_rows_updated_total 1000
frugal_rows_deferred_total 250
frugal_keys_looked_up_total 4000
frugal_gate_wait_seconds_total 2.000000000
frugal_apply_seconds_total 5.000000000
frugal_pending_bytes 1536
frugal_pending_bytes_peak 4096
frugal_pending_rows 12
frugal_uptime_seconds 10.000000000
frugal_health 0
frugal_world_size 2
frugal_committed_step 49
frugal_table_rows{table="a \"b\"\n\\c"} 7
frugal_table_bytes{table="a \"b\"\n\\c"} 2097152
frugal_trainer_step{rank="0"} 50
frugal_trainer_in_step{rank="0"} 1
frugal_trainer_in_step{rank="1"} 0
frugal_trainer_keys_looked_up_total{rank="0"} 3000
frugal_trainer_keys_looked_up_total{rank="1"} 1000
frugal_trainer_keys_pushed_total{rank="0"} 500
frugal_trainer_cache_hits_total{rank="0"} 10
frugal_trainer_cache_misses_total{rank="0"} 30
frugal_trainer_gate_wait_seconds_total{rank="0"} 2.000000000
frugal_trainer_gate_wait_seconds_total{rank="1"} 0.000000000
frugal_trainer_host_cache_bytes{rank="0"} 2048
frugal_trainer_hbm_cache_bytes{rank="0"} 0
frugal_trainer_hbm_cache_bytes{rank="1"} 4096
'''
# Four seconds later: 100 steps, and now a cache was asked.
SECOND = (FIRST.replace('committed_total 50', 'committed_total 150').replace('uptime_seconds 10', 'uptime_seconds 14')
          .replace('committed_step 49', 'committed_step 149')
          .replace('gate_wait_seconds_total 2', 'gate_wait_seconds_total 6')
          .replace('rows_updated_total 1000', 'rows_updated_total 1400')
          .replace('rows_deferred_total 250', 'rows_deferred_total 450')
          .replace('looked_up_total{rank="0"} 3000', 'looked_up_total{rank="0"} 3400')
          .replace('looked_up_total{rank="1"} 1000', 'looked_up_total{rank="1"} 200')  # another, since a moment ago
          .replace('hits_total{rank="0"} 10', 'hits_total{rank="0"} 40')
          .replace('misses_total{rank="0"} 30', 'misses_total{rank="0"} 40')
          .replace('wait_seconds_total{rank="0"} 2', 'wait_seconds_total{rank="0"} 3')
          + 'frugal_cache_hits_total 30\nfrugal_cache_misses_total 10\n')


class Top(unittest.TestCase):
  def setUp(self):
    self.folder = tempfile.TemporaryDirectory()
    self.file = os.path.join(self.folder.name, 'metrics')

  def tearDown(self):
    self.folder.cleanup()

  def write(self, text):
    """Another text in its place, whole at once."""
    with open(self.file + '.new', 'w', encoding='utf-8') as file:
      file.write(text)
    os.rename(self.file + '.new', self.file)

  def run_top(self, *arguments):
    return subprocess.run([PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60)

  def test_one_look_is_the_mean_since_the_opening(self):
    self.write(FIRST)
    done = self.run_top('--from', self.file, '--once', '--json')
    self.assertEqual((done.returncode, done.stderr), (0, ''))
    told = json.loads(done.stdout)
    self.assertEqual(told, {
        'uptime': 10, 'seconds': 10, 'health': 'FRUGAL_OK', 'world_size': 2, 'committed_step': 49,
        'steps_per_second': 5, 'aborts_per_second': 0, 'rows_per_second': 100, 'keys_per_second': 400,
        'new_rows_per_second': 0, 'hit_rate': None, 'stall': 0.1, 'deferred': 0.25, 'writing_cores': 0.5,
        'pending_rows': 12, 'pending_bytes': 1536, 'pending_bytes_peak': 4096,
        'tiers': {'hbm_caches': 4096, 'host_caches': 2048, 'host_tables': 2097152},
        'trainers': [{'rank': 0, 'step': 50, 'in_step': True, 'keys_per_second': 300, 'pushed_per_second': 50,
                      'hit_rate': 0.25, 'stall': 0.2, 'cache_bytes': 2048},
                     {'rank': 1, 'step': None, 'in_step': False, 'keys_per_second': 100, 'pushed_per_second': 0,
                      'hit_rate': None, 'stall': 0, 'cache_bytes': 4096}],
        'tables': [{'name': 'a "b"\n\\c', 'rows': 7, 'bytes': 2097152}]})

  def test_later_looks_are_of_the_time_between(self):
    self.write(FIRST)
    with subprocess.Popen([PROGRAM, '--from', self.file, '--json', '--interval', '0.02'], stdout=subprocess.PIPE,
                          text=True) as top:
      try:
        self.assertEqual(json.loads(top.stdout.readline())['seconds'], 10)
        self.assertEqual(json.loads(top.stdout.readline())['seconds'], 10)  # nothing new: as before
        self.write(SECOND)
        for line in top.stdout:
          told = json.loads(line)
          if told['committed_step'] == 149:
            break
        self.assertEqual((told['seconds'], told['steps_per_second'], told['rows_per_second']), (4, 25, 100))
        self.assertEqual((told['hit_rate'], told['stall'], told['deferred']), (0.75, 0.5, 0.5))
        first, second = told['trainers']
        self.assertEqual((first['keys_per_second'], first['hit_rate'], first['stall']), (100, 0.75, 0.25))
        self.assertEqual(second['keys_per_second'], 50)
        # Another engine, opened later: means since its opening.
        self.write(FIRST)
        for line in top.stdout:
          told = json.loads(line)
          if told['committed_step'] == 49:
            break
        self.assertEqual((told['seconds'], told['steps_per_second']), (10, 5))
      finally:
        top.terminate()

  def test_for_people(self):
    self.write(FIRST)
    done = self.run_top('--from', self.file, '--once')
    self.assertEqual(done.returncode, 0)
    self.assertNotIn('\033', done.stdout)
    for words in ('health FRUGAL_OK', 'committed step 49', 'steps/s 5', 'rows/s 100', 'stall 10.0 %', 'cache hits -',
                  'pending 12 rows, 1.50 KiB (peak 4.00 KiB)', '2.00 MiB  a "b"?\\c', 'inside', 'joined',
                  'caches on GPUs 4.00 KiB', 'tables in host memory 2.00 MiB', '25.0 %'):
      self.assertIn(words, done.stdout)

  def test_names_are_no_commands_to_a_terminal(self):
    self.write(FIRST.replace('a \\"b\\"\\n\\\\c', 'x\x1b[2J\x9b2Jé'))
    done = self.run_top('--from', self.file, '--once')
    self.assertEqual(done.returncode, 0)
    self.assertIn('x?[2J?2Jé', done.stdout)

  @unittest.skipIf(LIBRARY is None, 'no library was given')
  def test_an_engine(self):
    library = ctypes.CDLL(LIBRARY)
    engine, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = ctypes.create_string_buffer(100000)
    self.assertEqual(library.frugal_open(None, ctypes.byref(engine)), 0)
    self.assertEqual(library.frugal_metrics(engine, text, ctypes.c_size_t(len(text)), ctypes.byref(size)), 0)
    library.frugal_close(engine)
    self.write(text.value.decode())
    done = self.run_top('--from', self.file, '--once', '--json')
    self.assertEqual((done.returncode, done.stderr), (0, ''))
    told = json.loads(done.stdout)
    self.assertEqual((told['committed_step'], told['world_size'], told['trainers']), (None, 1, []))
    # Engines have every metric that the program asks for.
    asked = set(re.findall(r'(?:now|before|more|rate|has|of)\("([a-z_]+)"\)', SOURCE.read_text()))
    known = set(re.findall(r'# HELP frugal_(\w+) ', text.value.decode()))
    self.assertGreater(len(asked), 15)
    self.assertEqual(asked - known, set())

  def test_what_it_refuses(self):
    for arguments in ((), ('--from',), ('a', 'b'), ('a', '--from', 'b'), ('--what', 'a'), ('a', '--interval', '0'),
                      ('a', '--interval', 'x')):
      done = self.run_top(*arguments)
      self.assertEqual(done.returncode, 2, arguments)
      self.assertIn('ADDRESS', done.stderr)
    self.assertEqual(self.run_top('--from', self.file, '--once').returncode, 1)  # no such file
    for text in ('', 'frugal_uptime_seconds', 'frugal_uptime_seconds x\n', 'other_metric 5\n', 'frugal_health 0\n',
                 FIRST + 'frugal_table_rows{table=\n', FIRST + 'frugal_table_rows{table="} 1\n'):
      self.write(text)
      done = self.run_top('--from', self.file, '--once')
      self.assertEqual((done.returncode, done.stdout), (1, ''), text)
      self.assertIn('no text of frugal_metrics', done.stderr)
    done = self.run_top(os.path.join(self.folder.name, 'none'), '--once')
    self.assertEqual(done.returncode, 1)
    self.assertRegex(done.stderr, 'FRUGAL_ERR_(UNSUPPORTED|PEER_LOST)')


if __name__ == '__main__':
  unittest.main()
