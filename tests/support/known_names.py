"""The names that documents may use in backticks."""

import collections
import fnmatch
import os
import re

from support.pieces import C_ENDINGS


class Known:
  """The names that documents may use: of programs, files and tests, and options of commands."""

  def __init__(self, tree):
    self.names, self.options, self.paths, self.tests = set(), set(), set(), []
    self.classes = collections.defaultdict(list)  # name: (source, bases)
    for path in tree.sources:
      parts = path.split('/')
      for end in range(1, len(parts) + 1):
        for begin in range(end):
          tail = '/'.join(parts[begin:end])
          self.paths.update((tail, os.path.splitext(tail)[0]))
    self.names.update(word for path in self.paths for word in re.findall(r'\w+', path))
    for source in tree.programs:
      self.names |= source.names
      for piece in source.pieces:
        if piece.kind == 'string':
          self.names.update(w for w in re.findall(r'\w+', piece.text) if '_' in w or not re.search(r'\s', piece.text))
          self.paths.update(re.findall(r'[\w-]+\.\w+', piece.text))  # files that a program makes
      self.options.update(re.findall(r'--[a-z][\w-]*', source.text))
      if source.ending in C_ENDINGS:
        for name, rest in re.findall(r'\b(?:class|struct|enum|union|trait|impl)\s+(?:\w+\([^)]*\)\s*)?(?:\w+::)*(\w+)\b'
                                     r'([^;{]*)\{', source.text):
          self.classes[name].append((source, re.findall(r'(?:public|protected|private)\s+(?:\w+::)*(\w+)', rest)))
      elif 'NAME ' in source.text:  # of CMake; loops make several tests of one name
        for name in re.findall(r'\bNAME\s+([\w${}]+)', source.text):
          if len(re.sub(r'\$\{\w+\}|\W', '', name)) > 2:
            self.tests.append(re.compile(re.sub(r'\$\{\w+\}', r'\\w+', name)))

  def has_member(self, name, member, depth=0):
    return depth > 3 or any(member in source.names or any(self.has_member(base, member, depth + 1) for base in bases if
                                                          base in self.classes) for source, bases in self.classes[name])

  def has_path(self, text):
    text = re.sub(r'^(?:\.{1,2}/)+|/$|:\d+$', '', text)
    braces = re.fullmatch(r'(.*)\{([^}]*)\}(.*)', text)
    if braces:
      return all(self.has_path(braces[1] + middle + braces[3]) for middle in braces[2].split(','))
    return bool(fnmatch.filter(self.paths, text)) if '*' in text else text in self.paths

  def missing(self, text):
    """The part of a text in backticks that is no name, or None."""
    if re.fullmatch(r'[\w./*{},+-]+(:\d+)?', text) and re.search(r'/|\.\w+', text) and self.has_path(text):
      return None
    if re.fullmatch(r'[\w./-]*\.(' + '|'.join(e[1:] for e in C_ENDINGS) + r'|md|py|jl|sh|txt|cmake|patch|capnp)', text):
      return text
    for name, member in re.findall(r'\b([A-Z]\w*)::(\w+)', text):
      if name in self.classes and not self.has_member(name, member):
        return f'{name}::{member}'
    for option in re.findall(r'(?<![\w-])--[a-z][\w-]*', text):
      if option not in self.options:
        return option
    for chain, beginning in re.findall(r'(?<!\w)([A-Za-z_][\w.]*)([*<]?)', text):
      for name in chain.strip('.').split('.'):
        if not (self.has_name(name) or beginning and any(n.startswith(name) for n in self.names)):
          return chain
    return None

  def has_name(self, name):
    unnumbered = re.sub(r'_\d+$', '', name)  # frugal_test(SHARDS) numbers tests
    short = len(name) < 3 or re.fullmatch('[a-z][0-9]+', name)  # of an equation
    return short or {name, unnumbered} & self.names or any(test.fullmatch(name) for test in self.tests)
