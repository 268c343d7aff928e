#!/usr/bin/env python3
"""Makes op scripts and compares the hashes of any runners with those of the reference.

    compare.py [--seeds N] [--first SEED] [--processes | --together | --resumes] BUILD_FOLDER RUNNER...

A RUNNER is "c" or "cpp", which the build folder has, or NAME=COMMAND: a shell's command, to which
the script's path is added. It has to print exactly the lines "hash N OUTPUTS TABLES" of the
reference and to exit with 0. A runner that cannot be started, or that hangs, has failed and is not
tried again. Seeds count from 1; the last script is a long one.

With --together a runner gets all scripts at once, one engine after the other. This is for languages
whose compiler takes most of the time.

With --resumes the scripts also close the engine, and another one goes on from its checkpoint, in
the folder that the environment variable FRUGAL_FOLDER names.

With --processes the runners are trainer processes, attached to a frugal-controller. Each runner
replays each script alone. Then all runners together replay a script that is dealt to several
processes, in turn line by line: 1 to 8 ranks, the runners assigned round robin. Its tables and each
process's outputs must equal the reference's. The first runner, with all its ranks in one process,
must get the same tables.

Exit status 0 if all runners agree with the reference on all scripts. `opscript_maker SEED STEPS PREFIX`
of the build folder makes a script again.
"""

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading

SHORT, LONG = 40, 200  # steps of a script
TIMEOUT = 300  # seconds that a runner has for a script
# The calls, each with its status, that eight scripts or more must have, or a run has shown little.
# -1 INVALID_ARGUMENT, -2 BAD_HANDLE, -5 KEY_OUT_OF_RANGE, -6 TABLE_FULL,
# -7 EXISTS, -8 STEP_ORDER, -9 STEP_RANGE, -10 NOT_IN_STEP, -11 STEP_ABORTED, -12 BUSY,
# -13 TIMEOUT, -14 NAN.
EXPECTED = """
abort 0, abort -10, begin -8, begin -13, cancel 0, cancel -9, close_trainer 0, delete 0, delete -12,
end -8, flush 0, get 0, get -5, get -12, lookup -2, lookup -5, lookup -6, lookup -10, prefetch -5,
prefetch -9, push -5, push -6, push -10, push -14, put 0, put -6, put -12, read 0, read -12,
set_optimizer -1, set_optimizer -9, table -7, trainer -7, begin -11, end -11, lookup -11,
prefetch -11, push -11, abort -11
"""


def pairs(text):
    return {tuple(item.split()) for item in text.replace("\n", " ").split(",")}


def make(maker, seed, steps, prefix, *dealt):
    """Returns the script's set of (call, status). `dealt`: numbers of ranks and processes."""
    command = [*maker, str(seed), str(steps), prefix, *map(str, dealt)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {tuple(line.split()[:2]) for line in out.splitlines()}


def first_difference(lines, expected):
    for got, wanted in zip(lines, expected):
        if got != wanted:
            return f"printed '{got}', the reference has '{wanted}'"
    return f"printed {len(lines)} lines, the reference has {len(expected)}"


def replay(command, scripts, expected, environment=None):
    """Returns what is wrong, or None, and whether to try the runner with another script."""
    try:
        run = subprocess.run(
            command + scripts, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"no end after {TIMEOUT} s", False
    except OSError as error:
        return f"cannot be started: {error}", False
    if run.returncode != 0:
        return f"exit status {run.returncode}: {run.stderr.strip()[-500:]}", True
    lines = run.stdout.splitlines()
    return (None if lines == expected else first_difference(lines, expected)), True


@contextlib.contextmanager
def controller(program, folder):
    """Starts a controller. The environment of processes that attach to it."""
    address = os.path.join(folder, "service")
    process = subprocess.Popen([program, address], stdout=subprocess.PIPE, text=True)
    try:
        if not process.stdout.readline():
            sys.exit(f"{program} does not serve")
        yield {**os.environ, "FRUGAL_SERVICE": address}
    finally:
        process.terminate()
        if process.wait(TIMEOUT) != 0:
            sys.exit(f"{program} ended with {process.returncode}")
        process.stdout.close()


class Turns:
    """A runner that gets its script line by line, and says when it has done one."""

    def __init__(self, command, environment, folder, number):
        pipe = os.path.join(folder, f"turns{number}")
        os.mkfifo(pipe)
        self.process = subprocess.Popen(
            command + [pipe], env={**environment, "FRUGAL_TURNS": "1"}, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        # For reading, too: a runner that does not even open it is not waited for.
        self.script = os.fdopen(os.open(pipe, os.O_RDWR), "w", closefd=True)
        self.hashes = []

    def do(self, line):
        """False if it has ended."""
        self.script.write(line)
        self.script.flush()
        while True:
            answer = self.process.stdout.readline()
            if answer == "done\n":
                return True
            if not answer:
                return False
            self.hashes.append(answer.rstrip("\n"))

    def end(self):
        """Returns what is wrong, or None."""
        self.script.close()
        error = self.process.communicate()[1].strip()[-500:]
        return f"exit status {self.process.returncode}: {error}" if self.process.returncode else None


def replay_dealt(commands, program, script):
    """Returns what is wrong with each process, or None, and what it printed."""
    with tempfile.TemporaryDirectory() as folder, controller(program, folder) as environment:
        runners = [Turns(command, environment, folder, i) for i, command in enumerate(commands)]
        late = threading.Timer(TIMEOUT, lambda: [runner.process.kill() for runner in runners])
        late.start()
        try:
            with open(script, encoding="utf-8") as file:
                for text in file:
                    share = json.loads(text).get("share")
                    if not all([runner.do(text) for runner in (runners if share is None else [runners[share]])]):
                        break
            return [runner.end() for runner in runners], [runner.hashes for runner in runners]
        finally:
            late.cancel()


def read_lines(path):
    with open(path, encoding="ascii") as file:
        return file.read().splitlines()


def tables_of(lines):
    return [line.rsplit(" ", 1)[-1] for line in lines]


def processes(program, maker, runners, seed, steps, prefix):
    """Returns how many have failed, and the (call, status) that the dealt script has."""
    wrongs = []
    make(maker, seed, steps, prefix)
    for name, command in runners.items():
        with tempfile.TemporaryDirectory() as folder, controller(program, folder) as environment:
            wrong, _ = replay(command, [prefix + ".jsonl"], read_lines(prefix + ".expected"), environment)
        wrongs.append((f"{name} over a controller", wrong))

    # A process for each rank, except in each third script: there most processes have two ranks.
    ranks = 1 + seed % 8
    count = (ranks + 1) // 2 if seed % 3 == 0 else ranks
    script = prefix + ".dealt"
    seen = make(maker, seed, steps, script, ranks, count)
    names = [list(runners)[(seed + i) % len(runners)] for i in range(count)]
    ended, printed = replay_dealt([runners[name] for name in names], program, script + ".jsonl")
    # A process that fails may make others fail, so all failures are printed.
    for i, (name, wrong, lines) in enumerate(zip(names, ended, printed)):
        expected = read_lines(script + ".expected" + (str(i) if count > 1 else ""))
        if wrong is None and lines != expected:
            wrong = first_difference(lines, expected)
        wrongs.append((f"process {i} of {count} with {ranks} ranks, {name}", wrong))

    # The same in threads. The hash of its outputs equals no process's hash.
    first = next(iter(runners))
    try:
        threads = subprocess.run(runners[first] + [script + ".jsonl"], capture_output=True, text=True, timeout=TIMEOUT)
        same = threads.returncode == 0 and tables_of(threads.stdout.splitlines()) == tables_of(expected)
        wrong = None if same else f"other tables than the reference, or none: {threads.stderr.strip()[-500:]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        wrong = str(error)
    wrongs.append((f"{first} with {ranks} ranks in one process", wrong))

    for who, wrong in wrongs:
        if wrong:
            print(f"script {seed} of {steps} steps, {who}: {wrong}", flush=True)
    return sum(1 for _, wrong in wrongs if wrong), seen


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first", type=int, default=1)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--processes", action="store_true")
    kind.add_argument("--together", action="store_true")
    kind.add_argument("--resumes", action="store_true")
    parser.add_argument("build")
    parser.add_argument("runners", nargs="+")
    arguments = parser.parse_args()
    folder = os.path.join(os.path.abspath(arguments.build), "tests", "opscript")
    maker = [os.path.join(folder, "opscript_maker")]
    program = os.path.join(arguments.build, "tools", "controller", "frugal-controller")
    if not os.path.exists(maker[0]):
        sys.exit(f"{maker[0]} is not there: build the target opscript_maker")
    if arguments.resumes:
        maker.append("--resumes")
    runners = {}
    for runner in arguments.runners:
        name, _, command = runner.partition("=")
        own = os.path.join(folder, "opscript_" + name)
        runners[name] = shlex.split(command) if command else [own]

    names = ", ".join(runners)
    seen, failures = set(), 0
    scripts, all_expected = [], []
    with tempfile.TemporaryDirectory() as work:
        for i in range(arguments.seeds):
            seed = arguments.first + i
            last = i + 1 == arguments.seeds
            steps = LONG if last and not arguments.processes else SHORT
            prefix = os.path.join(work, f"script{seed}" if arguments.together else "script")
            if arguments.processes:
                wrong, calls = processes(program, maker, runners, seed, steps, prefix)
                failures += wrong
                seen |= calls
                continue
            seen |= make(maker, seed, steps, prefix)
            expected = read_lines(prefix + ".expected")
            scripts.append(prefix + ".jsonl")
            all_expected += expected
            if arguments.together and not last:
                continue
            told = f"scripts {arguments.first} to {seed}" if arguments.together else f"script {seed} of {steps} steps"
            for name, command in list(runners.items()):
                with tempfile.TemporaryDirectory() as checkpoints:
                    environment = {**os.environ, "FRUGAL_FOLDER": checkpoints}
                    wrong, again = replay(command, scripts, all_expected, environment)
                if wrong:
                    failures += 1
                    print(f"{told}, {name}: {wrong}", flush=True)
                if not again:
                    del runners[name]
            scripts, all_expected = [], []
            if last and failures == 0:
                for name in ["reference", *runners]:
                    print(f"{name:10} {expected[-1]}")
        wanted = pairs(EXPECTED)
        if arguments.resumes:
            wanted |= {("resume", "0")}
        if arguments.seeds >= 8 and not wanted <= seen:
            failures += 1
            print("no script has:", ", ".join(" ".join(pair) for pair in sorted(wanted - seen)))
    print(f"{arguments.seeds} scripts, {len(seen)} kinds of calls and statuses, {names}: {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
