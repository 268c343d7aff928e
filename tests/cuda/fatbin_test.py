"""The checks of fatbin.py complain about the kernels of bad.cu where they should, and only there.

    fatbin_test.py CUOBJDUMP OBJECT
"""

import sys

import fatbin

BUDGET = {name: (255, '-') for name in
          ('fused', 'unrounded', 'rounded', 'flushed', 'approximate', 'read_only', 'system',
           'generic', 'stack')}
BUDGET.update(good=(32, 'load+store'), scalar=(4, 'load'), half_vector=(255, 'load+store'),
              gone=(32, '-'))

# Check: {kernel: words of its complaint}; a kernel that is missing here must cause none.
WANTED = {
    'registers': {'stack': 'bytes of stack', 'scalar': '7 on sm_75; budget 4',
                  'unlisted': 'has no budget', 'gone': 'is no kernel'},
    'ptx': {'fused': 'fused multiply-add', 'unrounded': 'the driver may fuse',
            'flushed': 'denormals', 'approximate': 'not the IEEE', 'read_only': 'read-only cache',
            'system': 'system scope', 'generic': 'generic or local',
            'stack': 'local memory', 'scalar': 'no 16-byte ld', 'half_vector': 'no 16-byte st',
            'unlisted': 'is not in the list', 'gone': 'is not in the PTX'},
    'kernels': {'unlisted': 'not in the list', 'gone': 'not in the code'},
}

# Instructions that bad.cu does not have, and whether the PTX may have them.
INSTRUCTIONS = {
    'add.f32 %f3, %f1, %f2;': False, 'sub.f64 %fd3, %fd1, %fd2;': False,
    '@%p1 mul.f32 %f3, %f1, %f2;': False, 'add.f32x2 %rd3, %rd1, %rd2;': False,
    'mul.f16x2 %r3, %r1, %r2;': False, 'sub.bf16 %h3, %h1, %h2;': False,
    'add.rz.f32 %f3, %f1, %f2;': False, 'div.rp.f64 %fd3, %fd1, %fd2;': False,
    'sqrt.rz.f32 %f2, %f1;': False, 'fma.rn.f32x2 %rd4, %rd1, %rd2, %rd3;': False,
    'mad.f64 %fd4, %fd1, %fd2, %fd3;': False,
    'add.rn.f32x2 %rd3, %rd1, %rd2;': True, '@!%p1 sub.rn.f64 %fd3, %fd1, %fd2;': True,
    'sqrt.rn.f32 %f2, %f1;': True, 'mad.lo.s32 %r4, %r1, %r2, %r3;': True,
    'mul.wide.u32 %rd1, %r1, 4;': True, 'add.s64 %rd3, %rd1, %rd2;': True,
    'atom.global.gpu.add.f32 %f2, [%rd1], %f1;': True, 'neg.f32 %f2, %f1;': True,
}


def main():
  cuobjdump, path = sys.argv[1:]
  usage = fatbin.usage_of(cuobjdump, path)
  got = {
      'registers': fatbin.check_registers(usage, BUDGET),
      'ptx': fatbin.check_ptx(fatbin.ptx_of(cuobjdump, path), BUDGET),
      'kernels': fatbin.check_kernels(usage, set(BUDGET)),
  }
  errors = []
  for check, wanted in WANTED.items():
    told = got[check] or []
    for kernel, words in wanted.items():
      if not any(c.startswith(f'{kernel}:') and words in c for c in told):
        errors.append(f'{check} does not say of {kernel}: {words}')
    errors += [f'{check} says, and should not: {c}' for c in told
               if c.split(':')[0] not in wanted and
               # All of bad.cu is compiled with -ftz=true.
               'denormals' not in c]
  if fatbin.check_ptx('.version 9.0', BUDGET) is not None:
    errors.append('ptx does not report that there is no PTX')
  # A kernel for each instruction.
  ptx = ''.join(f'.entry frugal_of{i}(.param .u64 p)\n{{\n\t{line}\n\tret;\n}}\n'
                for i, line in enumerate(INSTRUCTIONS))
  told = fatbin.check_ptx(ptx, {f'of{i}': (255, '-') for i in range(len(INSTRUCTIONS))})
  for i, (line, allowed) in enumerate(INSTRUCTIONS.items()):
    if any(c.startswith(f'of{i}:') for c in told) == allowed:
      errors.append(f'ptx {"complains" if allowed else "does not complain"} of {line}')
  if errors:
    sys.exit('\n'.join(errors))
  print(f'{sum(map(len, WANTED.values()))} kinds of complaints, {len(INSTRUCTIONS)} instructions')


if __name__ == '__main__':
  main()
