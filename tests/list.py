"""Lists what each test file shows: its path in tests/ and the first sentence of its banner.

    python3 tests/list.py [WORD]...     all test files, or those whose path or banner has one of the words
    python3 tests/list.py --check       checks the banners and the heads of the mutants' patches

A test file is tests/**/*_test.cpp. Its banner is the comment at its beginning, and the banner's first paragraph says
in at most 25 words what the test shows. A patch of tests/mutants begins with a line of at most 25 words that says what
the mutant breaks. --check names each file that differs; then the exit status is 1.
"""

import pathlib
import re
import sys

TESTS = pathlib.Path(__file__).resolve().parent
MOST_WORDS = 25


def banner(path):
  """The first paragraph of the comment at the beginning of a C++ file."""
  lines = []
  with open(path, encoding='utf-8') as f:
    for line in f:
      if not line.startswith('// '):
        break
      lines.append(line[3:].strip())
  return ' '.join(lines)


def head(path):
  """The first line of a mutant's patch, if it is a sentence and no field, as "tests:" is."""
  with open(path, encoding='utf-8') as f:
    line = f.readline()
  return line[2:].strip() if line.startswith('# ') and not re.match(r'# \w+:', line) else ''


def fault(text):
  """What is wrong with a sentence; empty if nothing is."""
  words = sum(1 for word in text.split() if re.search(r'\w', word))
  if not words:
    return 'its first comment is missing'
  if words > MOST_WORDS:
    return f'its first comment has {words} words; at most {MOST_WORDS} are allowed'
  return '' if text.endswith('.') else 'its first comment does not end with a full stop'


def main():
  tests = {path: banner(path) for path in sorted(TESTS.rglob('*_test.cpp'))}
  if sys.argv[1:] == ['--check']:
    mutants = {path: head(path) for path in sorted((TESTS / 'mutants').glob('*.patch'))}
    texts = {**tests, **mutants}
    wrong = [f'{path.relative_to(TESTS.parent)}: {fault(text)}' for path, text in texts.items() if fault(text)]
    print('\n'.join(wrong) or f'{len(tests)} banners and {len(mutants)} heads are right')
    return 1 if wrong or not tests or not mutants else 0
  words = [word.lower() for word in sys.argv[1:]]
  lines = [f'{str(path.relative_to(TESTS)):44s} {text}' for path, text in tests.items()]
  found = [line for line in lines if not words or any(word in line.lower() for word in words)]
  print('\n'.join(found) or 'no test has one of these words in its path or first sentence')
  return 0 if found else 1


if __name__ == '__main__':
  sys.exit(main())
