"""Cuts a file into pieces: names, comments and strings of programs, blocks of documents."""

import collections
import os
import re

Piece = collections.namedtuple('Piece', 'kind line text path')  # path: the file whose scope applies

NAME = r'(?P<name>\b[A-Za-z_]\w*)'
QUOTED = r'"(?:\\.|[^"\\\n])*"'
CHARACTER = r"'(?:\\.|[^'\\\n])'"
HASHED = r'(?P<comment>(?<![^\s(\[{;])#[^\n]*(?:\n[ \t]*#[^\n]*)*|"""' + r'.*?"""' + r"|'''.*?''')|(?P<string>" + QUOTED
C_LIKE = re.compile(r'(?P<comment>//[^\n]*(?:\n[ \t]*//[^\n]*)*|/\*.*?\*/)|(?P<string>R"(\w*)\(.*?\)\3"|' + QUOTED +
                    ')|' + CHARACTER + '|' + NAME, re.S)
JULIA = re.compile(HASHED + ')|' + CHARACTER + '|' + NAME, re.S)
SHELL_LIKE = re.compile(HASHED + r"|'(?:\\.|[^'\\\n])*')|" + NAME, re.S)
C_ENDINGS = ('.h', '.hpp', '.cpp', '.c', '.inc', '.cu', '.rs')
LEADER = re.compile(r'(?m)^[ \t]*(?://[/!]?<?|/?\*+/?|#+)|\*+/|"""|\'\'\'')
ITEM = re.compile(r'(?:[-*+]|\d+\.|[A-Z][A-Z_0-9]+:)\s+|[A-Z][A-Z_]{3,}$|[A-Z][a-z]+: ')
COLUMN = re.compile(r'\S.*?\S {2,}(?=\S)')  # a comment's tables have columns between spaces


def blocks(text, line=1, markdown=True):
  """The paragraphs, list items and table cells of a text as (line, text), without blocks of code."""
  block, at, fenced, listed = [], line, False, False
  for n, raw in enumerate(text.split('\n') + [''], line):
    row = raw.strip()
    fence = markdown and row.startswith('```')
    item = ITEM.match(row) or not markdown and COLUMN.match(row)
    cells, heading = row.startswith('|'), markdown and row.startswith('#')
    code = fence or fenced or raw.startswith('    ') and not block and not listed and not item
    if block and (code or not row or item or cells or heading or not row.strip('-= ')):
      yield at, '\n'.join(block)
      block = []
    fenced ^= fence
    if code or not row.strip('-=|: '):
      listed = listed and markdown
      continue
    listed = bool(item) or listed and raw.startswith(' ')
    if cells or heading:
      yield from ((n, cell.strip('# ')) for cell in re.split(r'(?<!\\)\|', row.strip('|')))
      continue
    if not block:
      at = n
    block.append(row[item.end():] if item else row)


class Source:
  """A file as pieces: a name, comment or string of a program, or a block of a document."""

  def __init__(self, path, text):
    self.path, self.text, self.ending = path, text, os.path.splitext(path)[1]
    self.pieces = list(self.cut_patch() if self.ending == '.patch' else self.cut())
    self.names = {p.text for p in self.pieces if p.kind == 'name'}

  def cut(self):
    if self.ending == '.md':
      yield from (Piece('block', line, block, self.path) for line, block in blocks(self.text))
      return
    line, seen = 1, 0
    for match in self.grammar(self.ending).finditer(self.text):
      kind, text = match.lastgroup, match.group()
      if match.group('string'):
        kind = 'string'  # the delimiter of a raw string is a later group
      line, seen = line + self.text.count('\n', seen, match.start()), match.start()
      if kind:
        yield Piece(kind, line, LEADER.sub('', text) if kind == 'comment' else text, self.path)

  def cut_patch(self):
    """The comments of the head and of added lines, and all names."""
    target = self.path
    for line, text in enumerate(self.text.split('\n'), 1):
      if text.startswith('#'):
        yield Piece('comment', line, text.lstrip('# '), self.path)
      elif text.startswith('+++ b/'):
        target = text[6:]
      elif re.match(r'[ +-](?!--|\+\+)', text):
        for match in self.grammar(os.path.splitext(target)[1]).finditer(text[1:]):
          if match.group('name') or text[0] == '+' and match.group('comment'):
            yield Piece(match.lastgroup, line, LEADER.sub('', match.group()), target)

  @staticmethod
  def grammar(ending):
    return C_LIKE if ending in C_ENDINGS else JULIA if ending == '.jl' else SHELL_LIKE
