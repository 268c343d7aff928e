"""Every test has one label and one tier, and the processor time of every unit test is measured.

    labels.py BUILD_FOLDER
"""

import json
import subprocess
import sys

LABELS = {'unit', 'header', 'oracle', 'system'}
TIERS = {'tier_base', 'tier_ci', 'tier_all'}

tests = json.loads(subprocess.run(['ctest', '--test-dir', sys.argv[1], '--show-only=json-v1'], check=True,
                                  capture_output=True, text=True).stdout)['tests']
wrong = []
for test in tests:
  labels = {label for p in test['properties'] if p['name'] == 'LABELS' for label in p['value']}
  if len(labels & LABELS) != 1 or len(labels & TIERS) != 1 or len(labels) != 2:
    wrong.append(f'{test["name"]} has the labels {sorted(labels)}: one of {sorted(LABELS)} and one tier are wanted')
  measured = test.get('command', [''])[0].endswith('/frugal_budget')
  if measured != ('unit' in labels):
    wrong.append(f'{test["name"]} is {"" if measured else "not "}measured: frugal_test() does that for unit tests')
print('\n'.join(wrong) or f'{len(tests)} tests are labelled')
sys.exit(1 if wrong or not tests else 0)
