"""Programs of ranks in processes of their own, which are forked from one that has imported PyTorch: importing it takes
longer than most of what such programs train. frugal is imported by each of them."""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
from typing import Dict, List, Sequence

# Forks what a line of its input says, and prints the exit statuses. It has one thread, or its children would lack
# what the others hold. A child goes on below the loop, as a program that was started.
_SERVER = """
import faulthandler, json, os, runpy, sys
import torch, torch.distributed, torch._dynamo
from torch.nn.parallel import DistributedDataParallel

def serve():
    for line in sys.stdin:
        assert os.listdir("/proc/self/task") == [str(os.getpid())]
        children = []
        for environment, arguments in json.loads(line):
            child = os.fork()
            if child == 0:
                os.environ.clear()
                os.environ.update(environment)
                return arguments
            children.append(child)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)

arguments = serve()
if arguments:
    faulthandler.dump_traceback_later(240)  # where it hangs
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
"""

_servers: List["subprocess.Popen[str]"] = []


def _end() -> None:
    for server in _servers:
        server.communicate()
    _servers.clear()


atexit.register(_end)


def run(arguments: Sequence[str], environments: Sequence[Dict[str, str]], timeout: float = 600) -> List[int]:
    """Runs a program with these arguments once for each environment, side by side; returns their exit statuses."""
    if not _servers:
        command = [sys.executable, "-X", "faulthandler", "-c", _SERVER]
        path = os.pathsep.join(filter(None, sys.path))
        # NumPy's library starts threads where it is not told that one is enough.
        its = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
        _servers.append(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=its, start_new_session=True
            )
        )
    server = _servers[0]
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps([[environment, list(arguments)] for environment in environments]) + "\n")
    server.stdin.flush()
    if not select.select([server.stdout], [], [], timeout)[0]:
        os.killpg(server.pid, 9)  # and those that wait
    line = server.stdout.readline()
    if not line:
        _end()
        raise TimeoutError(f"{arguments[0]} has not ended in {timeout} seconds, or its server has failed")
    statuses: List[int] = json.loads(line)
    return statuses
