"""Small trees for words.py --self-test: check, files, table of replaced words (or of what is allowed), findings."""

LONG = ' '.join(['word'] * 31)
START = LONG[:39]
TABLE = '| # | term | definition |\n|---|---|---|\n'

CASES = [
    # Whole identifiers in their scope, and file names; not comments or strings.
    ('names', {
        'lib/a.cpp': 'int old_name; //old_name\nauto x = "old_name";\nint told_name, NEW;\n',
        'tests/a.cpp': 'old_name;',
    }, 'name\tlib\told_name\tnew_name', ['lib/a.cpp:1: old_name']),
    ('names', {'lib/old.h': '', 'lib/b/old.h': ''}, 'name\tlib,-lib/b\told\tnew', ['lib/old.h:1: old']),
    # A patch has the scope of the file that it changes.
    ('names', {
        'tests/m.patch': '# old\n--- a/lib/old_file.h\n+++ b/lib/a.h\n@@ -1 +1 @@\n-old\n+new(old)\n // old\n',
    }, 'name\tlib\told\tnew', ['tests/m.patch:5: old', 'tests/m.patch:6: old']),
    # Phrases across lines; not code, names, or strings of one word.
    ('prose', {
        'lib/a.cpp': '// A lock is let\n// go of.\nf("let go of", let, "letgo");\n',
        'a.md': 'Rows\nlet  go of `let go of`.\n```\nlet go of\n```\n| a | let go of |\n',
        'lib/b/a.h': '// let go of\n',
    }, 'prose\tall,-lib/b\tlet go of\treleases',
     ['lib/a.cpp:1: let go of', 'lib/a.cpp:3: let go of', 'a.md:2: let go of', 'a.md:6: let go of']),
    ('prose', {
        'dev': '# the Boundary\necho \'at the boundary\' "${x#boundary is}"\ny=${x#boundary}\n',
        'a.py': '"""The\nboundary, and the step boundary"""\nx = "boundary" # boundary\n',
        'm.patch': '# boundary\n+++ b/lib/a.h\n // boundary\n+ f(); // boundary\n',
    }, 'prose\tall\t(?<!step )boundary\trefresh',
     ['dev:1: boundary', 'dev:2: boundary', 'dev:2: boundary', 'a.py:2: boundary', 'a.py:3: boundary',
      'm.patch:1: boundary', 'm.patch:4: boundary']),
    # Code is one word; list items and table cells end a sentence; comments of lib do not count.
    ('sentences', {
        'a.md': f'{LONG}.\n\nA `a b` {LONG[:139]}.\nAnd `c`. {LONG.title()}.\n- {LONG}\n'
                f'| {LONG[:60]} | {LONG[60:]} |\n',
        'lib/a.h': f'// {LONG}\n',
        'include/a.h': f'/* A.\n * {LONG[:60].title()}\n * {LONG[60:]} */\nint a;  // {LONG}\n',
    }, '', [f'a.md:1: {START}', f'a.md:4: {START.title()}', f'a.md:5: {START}', f'include/a.h:2: {START.title()}',
            f'include/a.h:4: {START}']),
    ('backticks', {
        'lib/a.h': 'class Rows : public Base { int n; };  // gone\n',
        'lib/b.h': 'int other;',
        'lib/base.h': 'class Base { int base_; };\n',
        'tests/CMakeLists.txt': 'frugal_test(NAME steady_${mode})',
        'run.py': 'add("--quick", "a long_name of_it")',
        'a.md': '`Rows`, `Rows::n`, `Rows::base_`, `lib/{a,b}.h`, `lib/a.h`, `a.h:12`, `lib/`,'
                ' `steady_1`, `--quick`, `long_na*`\n'
                '`gone`, `Rows::other`, `c.h`,\n`lib/c.h`, `--slow`, `other`,\n`missing.n`, `0x1f`.\n',
    }, '', ['a.md:2: gone', 'a.md:2: Rows::other', 'a.md:2: c.h', 'a.md:3: lib/c.h', 'a.md:3: --slow',
            'a.md:4: missing.n']),
    ('lines', {
        'a.cpp': 'a' * 100 + '\n' + 'a' * 101,
        'a.py': 'a' * 120 + '\n' + 'a' * 121,
        'a.rs': 'a' * 110 + '\n' + 'a' * 111,
        'a.md': '| ' + 'a' * 100 + '\n' + 'https://' + 'a' * 100 + '\n' + 'b' * 101,
        'a.patch': 'a' * 101,
    }, '', ['a.cpp:2: ' + 'a' * 60, 'a.py:2: ' + 'a' * 60, 'a.rs:2: ' + 'a' * 60, 'a.md:3: ' + 'b' * 60]),
    ('glossary', {
        'docs/architecture.md': TABLE + '| 1 | slot state, **row** | x |\n| 2 | line | x |\n\n| a |\n|---|\n| b |\n',
        'lib/a.h': 'struct SlotState {}; // A row.\n',
    }, '', ['docs/architecture.md:4: line']),
    ('glossary', {
        'docs/architecture.md': TABLE + '| 1 | row | x |\n' * 31,
        'lib/a.h': 'row',
    }, '', ['docs/architecture.md:1: 31 terms']),
    ('glossary', {}, '', ['docs/architecture.md:1: no glossary']),
    ('sections', {
        'docs/a.md': '# Rows\n\n## Slots\n\n## 2. `Parts`\n',
        'lib/a.h': '// docs/a.md, section 2, "Slots"; a.md, "Slots" and "x". Section 3 of a.md,\n'
                   '// a.md, "Parts of". FRUGAL section 3.4, section 9.\n',
        'b.md': 'See [a](docs/a.md), section 4. [x](none.md)\n',
    }, '', ['lib/a.h:1: Section 3 of a.md', 'lib/a.h:2: section 9', 'lib/a.h:2: a.md, "Parts of"',
            'b.md:1: docs/a.md), section 4', 'b.md:1: docs/a.md', 'b.md:1: none.md']),
    # What is allowed is no finding; an entry without a use, a reason or a check is one.
    ('allowed', {'a.md': '`gone`, `torch.gone`, `lost`, `left`'},
     'backticks\ta.md\tgone\tit is gone\nbackticks\t*\ttorch.*\tPyTorch\nbackticks\tb.md\tlost\tit is lost\n'
     'backticks\t*\tleft\t?\nother\t*\ta\ta reason',
     ['a.md:1: lost', 'docs/architecture.md:1: no glossary', 'tests/words_allowed.txt:3: lost',
      'tests/words_allowed.txt:4: left', 'tests/words_allowed.txt:5: a']),
]
