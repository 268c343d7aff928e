"""Do the checks of fatbin.py complain where they should, and there only? Of the kernels of bad.cu.

    fatbin_test.py CUOBJDUMP OBJECT
"""

import sys

import fatbin

BUDGET = {name: (255, '-') for name in
          ('fused', 'flushed', 'approximate', 'read_only', 'system', 'generic', 'stack')}
BUDGET.update(good=(32, 'load+store'), scalar=(4, 'load'), half_vector=(255, 'load+store'),
              gone=(32, '-'))

# Check: {kernel: words of its complaint}; a kernel that is not here must give none.
WANTED = {
    'registers': {'stack': 'bytes of stack', 'scalar': '7 on sm_75; budget 4',
                  'unlisted': 'has no budget', 'gone': 'is no kernel'},
    'ptx': {'fused': 'fused multiply-add', 'flushed': 'denormals', 'approximate': 'not the IEEE',
            'read_only': 'read-only cache', 'system': 'system scope', 'generic': 'generic or local',
            'stack': 'local memory', 'scalar': 'no 16-byte ld', 'half_vector': 'no 16-byte st',
            'unlisted': 'is not in the list', 'gone': 'is not in the PTX'},
    'kernels': {'unlisted': 'not in the list', 'gone': 'not in the code'},
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
    errors.append('ptx does not tell that there is no PTX')
  if errors:
    sys.exit('\n'.join(errors))
  print(f'{sum(map(len, WANTED.values()))} kinds of complaints')


if __name__ == '__main__':
  main()
