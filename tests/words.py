#!/usr/bin/env python3
"""Checks the words of the tree: names and phrases that the glossary replaced, long sentences, stale names in documents.

    words.py [--self-test] [--count] [--fix-list] [PATH...]

With paths: all findings in these files and folders. Else at most 20 of each check that finds more than LIMITS allows.
--count prints a table of checks and folders, --fix-list candidate lines for tests/words_allowed.txt.
The exit status is 1 if a check fails, 77 where git is missing. Two tables have columns between tabs, and `#` before
comments:

    words_replaced.txt   name or prose, scope, old, new. A scope is `all`, or files and folders between commas; `-`
                         excludes one. An old name is a whole identifier. Old prose is a regular expression.
    words_allowed.txt    check, file or `*`, text, reason. A text that ends in `*` is the beginning of one.
                         An entry that matches nothing is a finding, too.
"""

import argparse
import collections
import os
import re
import subprocess
import sys

from support.known_names import Known
from support.pieces import Piece, Source, blocks
from words_cases import CASES

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# The most findings of each check; None switches a check off.
LIMITS = {'names': 0, 'prose': 0, 'sentences': 0, 'backticks': 0, 'lines': 0, 'glossary': 0, 'sections': 0,
          'allowed': 0}
SHOWN = 20
SENTENCE_WORDS = 30
GLOSSARY, GLOSSARY_ROWS = 'docs/architecture.md', 30
COLUMNS = collections.defaultdict(lambda: 100, {'.py': 120, '.jl': 120, '.rs': 110})
# Records, generated files and the lists of this script.
UNREAD = re.compile(
    r'docs/gpu-record\.md|tests/(words_|record/record\.txt|install/frugal\.|checkpoint/folder-)|LICENSE')

Finding = collections.namedtuple('Finding', 'check path line text write')


class Tree:
  """The files to check, by path, and the two tables."""

  def __init__(self, files, replaced='', allowed=''):
    self.sources = {path: Source(path, text) for path, text in files.items()}
    self.documents = [s for s in self.sources.values() if s.ending == '.md']
    self.programs = [s for s in self.sources.values() if s.ending not in ('.md', '.patch')]
    self.replaced = list(self.rows('words_replaced.txt', replaced))
    self.allowed = list(self.rows('words_allowed.txt', allowed))
    self.name_tables, self.prose_patterns = {}, {}

  @staticmethod
  def rows(name, text):
    for line, row in enumerate(text.split('\n'), 1):
      if row and not row.startswith('#'):
        columns = row.split('\t')
        if len(columns) != 4:
          sys.exit(f'tests/{name}:{line}: four columns are wanted, between tabs')
        yield line, *columns

  @staticmethod
  def in_scope(scope, path):
    inside = scope.startswith(('all', '-'))
    for part in scope.split(','):
      folder = part.lstrip('-')
      if path == folder or path.startswith(folder + '/'):
        inside = not part.startswith('-')
    return inside

  def replaced_names(self, path):
    """The names that are replaced in a file, with the new ones."""
    if path not in self.name_tables:
      self.name_tables[path] = {old: new for _, kind, scope, old, new in self.replaced
                                if kind == 'name' and self.in_scope(scope, path)}
    return self.name_tables[path]

  def replaced_prose(self, path):
    """What finds the replaced prose of a file, and what to write for each of its groups."""
    rows = [(f'line_{line}', old, new) for line, kind, scope, old, new in self.replaced
            if kind == 'prose' and self.in_scope(scope, path)]
    groups = tuple(group for group, _, _ in rows)
    if groups not in self.prose_patterns:
      pattern = '|'.join(f'(?P<{group}>{old})' for group, old, _ in rows).replace(' ', r'\s') or '(?!)'
      pattern = r'(?:\b|(?=\W))(?:' + pattern + ')'  # quickly past what is within a word
      self.prose_patterns[groups] = re.compile(pattern, re.I), {group: new for group, _, new in rows}
    return self.prose_patterns[groups]


# ---- The checks --------------------------------------------------------------------------------
def check_names(tree):
  """Identifiers, and files, that the glossary replaced."""
  for source in tree.sources.values():
    stem = os.path.splitext(os.path.basename(source.path))[0]
    for piece in [Piece('name', 1, stem, source.path)] + source.pieces:
      if piece.kind == 'name' and piece.text in tree.replaced_names(piece.path):
        yield Finding('names', source.path, piece.line, piece.text, tree.replaced_names(piece.path)[piece.text])


def check_prose(tree):
  """Replaced words in comments, messages and documents."""
  for source in tree.sources.values():
    pattern, write = tree.replaced_prose(source.path)
    for piece in source.pieces:
      if piece.kind != 'name' and (piece.kind != 'string' or ' ' in piece.text):
        text = re.sub(r'`[^`]*`', lambda code: '`' + '\n' * code.group().count('\n') + '`', piece.text)
        text = re.sub(r'[ \t]*\n[ \t]*', '\n', re.sub('  +', ' ', text))
        for match in pattern.finditer(text):
          line = piece.line + text.count('\n', 0, match.start())
          yield Finding('prose', source.path, line, ' '.join(match.group().lower().split()), write[match.lastgroup])


def check_sentences(tree):
  """Sentences with too many words, in documents and in the comments of public headers."""
  for source in tree.sources.values():
    if source.ending == '.md' or source.path.startswith('include/'):
      for piece in source.pieces:
        for line, block in blocks(piece.text, piece.line, False) if piece.kind == 'comment' else [piece[1:3]]:
          text = re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', block) if piece.kind in ('comment', 'block') else ''
          text = re.sub(r'`[^`]*`', 'X', text).replace('**', '').replace('e.g.', 'eg').replace('i.e.', 'ie')
          for sentence in re.split(r'(?<=[.!?])(?=["\')]*\s+(?:[A-Z`"(*]|frugal_))', text):
            count = sum(bool(re.search('[A-Za-z]', w)) for w in re.findall(r"\w[\w'./:-]*", sentence))
            if count > SENTENCE_WORDS:
              start = line + re.match(r'\s*', sentence).group().count('\n')
              yield Finding('sentences', source.path, start, ' '.join(sentence.split()[:8]),
                            f'at most {SENTENCE_WORDS} words, not {count}')
            line += sentence.count('\n')


def check_backticks(tree):
  """Names in backticks that are in no program, path, test or command."""
  known = Known(tree)
  for source in tree.documents:
    for piece in source.pieces:
      for match in re.finditer(r'`([^`]+)`', piece.text):
        text = ' '.join(match[1].split())
        missing = known.missing(text)
        if missing:
          line = piece.line + piece.text.count('\n', 0, match.start())
          yield Finding('backticks', source.path, line, missing, f'a name of the code, in `{text}`')


def check_lines(tree):
  """Lines that are too long."""
  for source in tree.sources.values():
    columns = COLUMNS[source.ending]
    for n, line in enumerate(source.text.split('\n'), 1):
      table = source.ending == '.md' and line.lstrip().startswith('|')
      if len(line) > columns and source.ending != '.patch' and not table and '://' not in line:
        yield Finding('lines', source.path, n, line.strip()[:60], f'at most {columns} columns, not {len(line)}')


def check_glossary(tree):
  """The table of terms in the document of the architecture: its length, and whether the code uses each term."""
  rows = [(n, [c.strip(' *`') for c in line.strip('|').split('|')]) for n, line in
          enumerate(tree.sources[GLOSSARY].text.split('\n'), 1) if line.startswith('|')]
  head = next((i for i, (_, cells) in enumerate(rows) if 'term' in map(str.lower, cells)), None)
  if head is None:
    yield Finding('glossary', GLOSSARY, 1, 'no glossary', 'a table with a column `term`')
    return
  column = [cell.lower() for cell in rows[head][1]].index('term')
  text = '\n'.join(s.text for s in tree.programs if s.path.startswith(('lib/', 'include/')))
  text = re.sub(r'[\s_*/#-]+', ' ', re.sub(r'(?<=[a-z])(?=[A-Z])', ' ', text)).lower()
  terms = 0
  for (before, _), (n, cells) in zip(rows[head + 1:], rows[head + 2:]):
    if n != before + 1:
      break
    terms += 1
    for term in re.split(r', | / ', cells[column].lower().replace('*', '')):
      if not re.search(r'\b' + re.escape(term.replace('-', ' ')).rstrip('e'), text):
        yield Finding('glossary', GLOSSARY, n, term, 'a term that lib or include uses')
  if terms > GLOSSARY_ROWS:
    yield Finding('glossary', GLOSSARY, rows[head][0], f'{terms} terms', f'at most {GLOSSARY_ROWS}')


DOCUMENT = r'(?P<document>[\w./-]+\.md)\W{0,3}\s+'
NUMBER = re.compile(r'(?:' + DOCUMENT + r')?\b[Ss]ection\s+(?P<heading>\d+)\b(?!\.\d)(?:\s+of\s+(?P<of>[\w./-]+\.md))?')
QUOTED = re.compile(DOCUMENT + r'"(?P<heading>[^"]+)"(?P<of>)')


def check_sections(tree):
  """References to headings, and links to files, that do not exist. A number alone may be of any document."""
  headings = [(s.path, re.sub('[`*]', '', h)) for s in tree.sources.values() if s.ending in ('.md', '.h')
              for h in re.findall(r'(?m)^(?:#+ +| \* (?=\d+\. ))(.*?) *$', s.text)]
  for source in tree.sources.values():
    for piece in source.pieces:
      for pattern in (NUMBER, QUOTED) if piece.kind in ('comment', 'block') else ():
        for match in pattern.finditer(piece.text):
          own = source.ending == '.md' or source.path.startswith('include/')
          document = match['document'] or match['of'] or (source.path if own else '.md')
          wanted = ' '.join(match['heading'].split())
          there = [heading for path, heading in headings if path.endswith(document.lstrip('./'))]
          if not (wanted in there or pattern == NUMBER and any(re.match(wanted + r'\b', heading) for heading in there)):
            line = piece.line + piece.text.count('\n', 0, match.start())
            text = ' '.join(match.group().split())
            yield Finding('sections', source.path, line, text, 'the name of a heading that exists')
      for link in re.findall(r'\]\(([^)#\s:]+)[^):]*\)', piece.text) if piece.kind == 'block' else ():
        target = os.path.normpath(os.path.join(os.path.dirname(source.path), link))
        if not os.path.exists(os.path.join(ROOT, target)):
          yield Finding('sections', source.path, piece.line, link, 'a file that exists')


def check(tree):
  """The findings of all checks that are on, without what is allowed."""
  findings, used = [], set()
  for name in LIMITS:
    if LIMITS[name] is None or name == 'allowed':
      continue
    entries = [row for row in tree.allowed if row[1] == name]
    for finding in globals()['check_' + name](tree):
      mine = {row[0] for row in entries if row[2] in ('*', finding.path) and (
          finding.text == row[3] or row[3].endswith('*') and finding.text.startswith(row[3][:-1]))}
      used |= mine
      findings += [] if mine else [finding]
  for line, name, _, text, reason in tree.allowed:
    if name not in LIMITS or LIMITS[name] is not None and line not in used or len(reason) < 4:
      findings.append(Finding('allowed', 'tests/words_allowed.txt', line, text, 'a needed entry, with its reason'))
  return findings


# ---- Input and output --------------------------------------------------------------------------
def read_tree():
  """All text files of the checkout that are not ignored."""
  listed = subprocess.run(['git', '-C', ROOT, 'ls-files', '-co', '--exclude-standard'], capture_output=True, text=True)
  if listed.returncode:
    print(f'skipped: this is no checkout of git: {listed.stderr}')
    sys.exit(77)
  files = {}
  for path in sorted(set(listed.stdout.split('\n'))):
    full = os.path.join(ROOT, path)
    if os.path.isfile(full) and not os.path.islink(full):
      with open(full, encoding='utf-8', errors='replace') as file:
        files[path] = '' if UNREAD.match(path) else file.read()
  tables = []
  for name in ('words_replaced.txt', 'words_allowed.txt'):
    with open(os.path.join(ROOT, 'tests', name), encoding='utf-8') as file:
      tables.append(file.read())
  return Tree(files, *tables)


def self_test():
  """Every check finds what it must in small trees, and nothing else."""
  status = 0
  for name, files, table, wanted in CASES:
    tree = Tree({GLOSSARY: '', **files}, *('', table) if name == 'allowed' else (table,))
    findings = check(tree) if name == 'allowed' else globals()['check_' + name](tree)
    found = [f'{f.path}:{f.line}: {f.text}' for f in findings]
    if found != wanted:
      print(f'{name}: found {found}, not {wanted}')
      status = 1
  print(f'{len(CASES)} cases')
  return status or set(LIMITS) != {case[0] for case in CASES}


def folder(path):
  parts = path.split('/')
  return 'mutants' if path.startswith('tests/mutants/') else parts[0] if len(parts) > 1 else 'root'


def print_counts(findings):
  folders = sorted({folder(f.path) for f in findings})
  print(f'{"":10}' + ''.join(f'{name:>10}' for name in folders + ['all', 'limit']))
  for name, limit in LIMITS.items():
    counts = collections.Counter(folder(f.path) for f in findings if f.check == name)
    row = [counts[f] for f in folders] + [sum(counts.values()), 'off' if limit is None else limit]
    print(f'{name:10}' + ''.join(f'{cell:>10}' for cell in row))


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  for option in ('--self-test', '--count', '--fix-list'):
    parser.add_argument(option, action='store_true')
  parser.add_argument('paths', nargs='*', metavar='PATH')
  args = parser.parse_args()
  if args.self_test:
    return self_test()
  findings = check(read_tree())
  if args.fix_list:
    for entry in sorted({(f.check, f.path, f.text) for f in findings if f.check != 'allowed'}):
      print(*entry, '?', sep='\t')
    return 0
  if args.count:
    print_counts(findings)
    return 0
  if args.paths:
    places = [os.path.relpath(os.path.abspath(path), ROOT) for path in args.paths]
    findings = [f for f in findings if any(p == '.' or f.path == p or f.path.startswith(p + '/') for p in places)]
  status = 0
  for name, limit in LIMITS.items():
    mine = [f for f in findings if f.check == name]
    bad = len(mine) > (0 if args.paths else limit or 0)
    for f in mine[:None if args.paths else SHOWN] if bad else ():
      print(f'{f.path}:{f.line}: {f.check}: {f.text} (write {f.write})')
    status |= bad
    print(f'{name}: {len(mine)}, at most {limit}' if limit is not None else f'{name}: off')
  return status


if __name__ == '__main__':
  sys.exit(main())
