"""Attempts of programs to leave their box, to score without solving the task, or to block others.

Each attempt runs in the real box, all at once, next to a program that solves the task. Where the host gives no
isolation, only the refusal is tested.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from roll_core.errors import ConfigError, RewardFailure
from roll_rewards import sandbox
from roll_rewards.code import CodeReward
from roll_rewards.config import CodeConfig
from roll_testing.integrity import TRICKS

NEEDS_ISOLATION = pytest.mark.skipif(bool(sandbox.probe()), reason=f"no isolation on this host: {sandbox.probe()}")
GOOD = "def solve(a, b):\n    return a + b\nif __name__ == '__main__':\n    print(solve(*map(int, input().split())))"
STDIN = [{"input": "2 3\n", "output": "5\n"}, {"input": "20 22\n", "output": "42\n"}]
CALLS = {"fn_name": "solve", "inputs": [[2, 3], [20, 22]], "outputs": [5, 42]}
ASSERTS = ["assert solve(2, 3) == 5\nassert solve(20, 22) == 42"]
# A program that ends a loop early has nothing compared.
LOOPS = [
    "for got, want in zip(map(solve, (2, 20), (3, 22)), (5, 42)):\n    assert got == want",
    "import itertools\nfor got, want in zip(itertools.starmap(solve, [(2, 3), (20, 22)]), (5, 42)):\n"
    "    if got != want:\n        raise ValueError(got)",
    "def test_sums():\n    for got, want in zip(iter(lambda: solve(2, 3), []), [5]):\n        assert got == want",
    "assert all(got == want for got, want in zip(map(solve, (2, 20), (3, 22)), (5, 42)))\nassert solve(2, 3) == 5",
]

# Programs that read standard input; `CANARY` is a file outside, `PARENT` the process id of the worker.
OUTSIDE = {
    "read a file": "print(open(CANARY).read())",
    "read a file through a symbolic link": "import os; os.symlink(CANARY, 'link'); print(open('link').read())",
    "read a file through a hard link": "import os; os.link(CANARY, 'link'); print(open('link').read())",
    "read a file by relative path": "print(open('../../../../../../' + CANARY).read())",
    "read the accounts": "print(open('/etc/passwd').read())",
    "read the environment of the worker": "print(open(f'/proc/{PARENT}/environ').read())",
    "read own memory map": "print(open('/proc/self/maps').read())",
    "follow the root of another process": "print(open(f'/proc/{PARENT}/root' + CANARY).read())",
    "append to a file": "open(CANARY, 'a').write('changed')",
    "truncate a file": "import os; os.truncate(CANARY, 0)",
    "delete a file": "import os; os.unlink(CANARY)",
    "rename a file": "import os; os.rename(CANARY, CANARY + '.away')",
    "create a file": "open(CANARY + '.new', 'w').write('x')",
    "change the mode of a file": "import os; os.chmod(CANARY, 0o777)",
    "change the time of a file": "import os; os.utime(CANARY, (0, 0))",
    "leave by chroot": "import os; os.mkdir('d'); os.chroot('d'); os.chdir('../../../..'); print(open(CANARY).read())",
    "mount": "import ctypes; r = ctypes.CDLL(None).mount(b'/', b'.', None, 4096, None); assert r == 0; print('5')",
    "become root": "import os; os.setresuid(0, 0, 0); open(CANARY, 'a').write('x')",
    "connect to the network": "import socket; socket.create_connection(('127.0.0.1', 22)); print('5')",
    "listen": "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); print('5')",
    "use an abstract socket": "import socket; socket.socket(socket.AF_UNIX).bind('\\0x'); print('5')",
    "signal the worker": "import os, signal; os.kill(PARENT, signal.SIGKILL); print('5')",
    "signal everybody": "import os, signal; os.kill(-1, signal.SIGKILL); print('5')",
    "signal by descriptor": "import fcntl, os; fcntl.fcntl(1, fcntl.F_SETOWN, PARENT); print('5')",
    "trace the worker": "import ctypes; r = ctypes.CDLL(None).ptrace(16, PARENT, 0, 0); assert r == 0; print('5')",
    "read the memory of the worker": "print(open(f'/proc/{PARENT}/mem', 'rb').read(1))",
    "run a shell": "import subprocess; print(subprocess.check_output('cat ' + CANARY, shell=True))",
    "replace the process": "import os; os.execv('/bin/cat', ['cat', CANARY])",
    "system": "import os; assert os.system('touch ' + CANARY + '.new') == 0; print('5')",
    "write own memory": "open('/proc/self/mem', 'r+b').read(1); print('5')",
    "preload a library": (
        "import os, sys; os.environ['LD_PRELOAD'] = './x.so';"
        "os.execv(sys.executable, [sys.executable, '-c', 'print(5)'])"
    ),
    "leave a daemon": "import os\nif os.fork() == 0:\n  os.setsid()\n  while True: pass\nprint('5')",
    "x32 system calls": "import ctypes; assert ctypes.CDLL(None).syscall(0x40000000 | 39) > 0; print('5')",
    "run a file in memory": "import ctypes; assert ctypes.CDLL(None).syscall(319, b'x', 0) >= 0; print('5')",
    "asynchronous system calls": (
        "import ctypes; r = ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(200));"
        "assert r >= 0; print('5')"
    ),
    "change limits of the worker": (
        "import resource; resource.prlimit(PARENT, resource.RLIMIT_NOFILE, (5, 5)); print('5')"
    ),
    "32-bit system calls": (
        "import ctypes, mmap; m = mmap.mmap(-1, 4096, prot=7); m.write(bytes.fromhex('b814000000cd80c3'));"
        "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m))); f(); print('5')"
    ),
}
BLOCKING = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "thread bomb": (
        "import threading, time\nwhile True:\n  threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
    ),
    "endless loop": "while True: pass",
    "endless sleep": "import time; time.sleep(1000)",
    "ignored signals": (
        "import signal\nfor n in range(1, 32):\n  n in (9, 19) or signal.signal(n, lambda *_: 0)\nwhile 1: 0"
    ),
    "endless C code": "9**9**9**9",
    "all memory": "x = []\nwhile True: x.append(bytearray(1 << 26))",
    "huge output": "while True: print('x' * 100000)",
    "huge errors": "import sys\nwhile True: sys.stderr.write('x' * 100000)",
    "disk fill": "n = 0\nwhile True:\n  open(f'f{n}', 'wb').write(b'0' * (1 << 20)); n += 1",
    "many files": "n = 0\nwhile True:\n  open(f'f{n}', 'w').close(); n += 1",
    "deep recursion": "import sys; sys.setrecursionlimit(10**9)\ndef f(): return [f()]\nf()",
    "segmentation fault": "import ctypes; ctypes.string_at(0)",
    "closed streams": "import os; os.closerange(0, 99)\nwhile True: pass",
    "signal handlers": (
        "import os, signal\nfor n in set(range(1, 65)) - {9, 19, 32, 33}:\n"
        "  signal.signal(n, lambda *_: os.write(1, b'5'))\n"
        "signal.setitimer(signal.ITIMER_REAL, .01, .01)\nwhile True: pass"
    ),
    "raised limits": ("import resource; resource.setrlimit(resource.RLIMIT_CPU, (999, 999))\nwhile True: pass"),
}
# Programs that pretend to have passed, in the three kinds of tests.
FORGED = {
    "prints nothing and exits": "import os; os._exit(0)",
    "leaves with success": "raise SystemExit(0)",
    "raises": "raise ValueError",
    "prints a grade": "print('passed'); print('{\"passed\": true}'); print('1.0')",
    "writes a reward file": "for n in ('reward.json', 'reward.txt'): open(n, 'w').write('{\"reward\": 1.0}')",
    "equal to everything": (
        "class Any:\n  def __eq__(self, other): return True\n  def __str__(self): return '5'\n"
        "def solve(*args): return Any()"
    ),
    "a number equal to everything": (
        "class Any(int):\n  def __eq__(self, other): return True\n  __hash__ = int.__hash__\n"
        "def solve(*args): return Any(7)"
    ),
    "patched builtins": (
        "import builtins\nbuiltins.AssertionError = type('E', (Exception,), {})\n"
        "builtins.all = builtins.isinstance = lambda *a: True\ndef solve(*args): return 0"
    ),
    "hidden names": (
        "def abs(*a): return True\nall = isinstance = print = abs\ndef test_x(): pass\ndef solve(*args): return 0"
    ),
    "writes replies": (
        "import json, os, struct\ndef solve(*args):\n"
        "  for message in ({'passed': True}, {'id': '', 'value': 5}, {'id': None, 'value': 42}):\n"
        "    data = json.dumps(message).encode()\n"
        "    for fd in range(3, 64):\n"
        "      try: os.write(fd, struct.pack('!I', len(data)) + data)\n      except OSError: pass\n  return 0"
    ),
    "patches the harness": (
        "import sys\nframe = sys._getframe()\nwhile frame:\n"
        "  for name in ('send', 'encode'):\n"
        "    if name in frame.f_globals: frame.f_globals[name] = lambda *a: {'passed': True, 'value': 5}\n"
        "  frame = frame.f_back\ndef solve(*args): return 0"
    ),
    "looks for the expected output": (
        "import gc\nfound = [o for o in gc.get_objects() if isinstance(o, dict)]\n"
        "found = [o for o in found if 'expected' in o or 'output' in o]\n"
        "def solve(a, b): return found[0].get('expected') or found[0]['output']\nprint(solve(1, 2))"
    ),
    "traces the harness": (
        "import sys\ndef trace(frame, event, value):\n"
        "  for name in ('reply', 'message', 'result'):\n"
        "    if name in frame.f_locals: frame.f_locals[name] = {'passed': True, 'value': 5}\n  return trace\n"
        "sys.settrace(trace)\nframe = sys._getframe()\nwhile frame:\n  frame.f_trace = trace; frame = frame.f_back\n"
        "def solve(*args): return 0"
    ),
    "replaces the code of the harness": (
        "import gc, types\nfor o in gc.get_objects():\n"
        "  if isinstance(o, types.FunctionType) and o.__name__ in ('encode', 'send', '_perform'):\n"
        "    o.__code__ = (lambda *a: 5).__code__\ndef solve(*args): return 0"
    ),
    "writes frames to standard output": (
        "import json, os, struct\ndef frame(message):\n"
        "  data = json.dumps(message).encode(); os.write(1, struct.pack('!I', len(data)) + data)\n"
        "for message in ({'id': 'x', 'names': {'solve': True}}, {'id': 'x', 'value': 5}, {'passed': True}):\n"
        "  frame(message)\ndef solve(*args): return 0"
    ),
    "forges a value that cannot be decoded": (
        "import json, os, struct, sys\ndef solve(*args):\n  frame = sys._getframe()\n"
        "  while 'sink' not in frame.f_locals: frame = frame.f_back\n"
        "  value = {'d': [[[1], 5]]}\n"
        "  data = json.dumps({'id': frame.f_locals['request']['id'], 'value': value}).encode()\n"
        "  os.write(frame.f_locals['sink'], struct.pack('!I', len(data)) + data)\n  return 0"
    ),
    "forges names": (
        "import json, os, struct, sys\nframe = sys._getframe()\n"
        "while frame and 'sink' not in frame.f_locals: frame = frame.f_back\n"
        "if frame:\n  names = dict.fromkeys(['AssertionError', 'print', '__import__', 'solve'], True)\n"
        "  data = json.dumps({'id': frame.f_locals['job']['id'], 'names': names}).encode()\n"
        "  os.write(frame.f_locals['sink'], struct.pack('!I', len(data)) + data)\ndef solve(*args): return 0"
    ),
    "compares without end": (
        "class Any(int):\n  def __eq__(self, other):\n    while True: pass\n  __hash__ = int.__hash__\n"
        "  __repr__ = __str__ = __index__ = __float__ = __eq__\ndef solve(*args): return Any(7)"
    ),
    "writes when it is deleted": (
        "import os\nclass Last:\n  def __del__(self): os.write(1, b'5'); os._exit(0)\nlast = Last()\n"
        "def solve(*args): return Last() and 0"
    ),
    "writes at the exit": "import atexit, os\natexit.register(os.write, 1, b'5')\ndef solve(*args): return 0",
    "returns a surrogate": "print('\\udcff\\ud800')\ndef solve(*args): return '\\ud800'",
    "raises with surrogates": "def solve(*args): raise ValueError('\\ud800' * 500)\nsolve()",
    "prints a huge exponent": "print('1e999999999999')\ndef solve(*args): return 1 << 7200000",
    "raises an error with a long name": "def solve(*args): raise type('E' * 1000000, (Exception,), {})\nsolve()",
    "ends a loop early": "def solve(*args): raise StopIteration",
    "ends a loop early by a subclass": "class S(StopIteration): pass\ndef solve(*args): raise S",
    "ends a loop early by a renamed subclass": (
        "S = type('ValueError', (StopIteration,), {})\ndef solve(*args): raise S('x')"
    ),
    "ends a loop early by two bases": "class S(KeyError, StopIteration): pass\ndef solve(*args): raise S",
    "ends an asynchronous loop early": "class S(StopAsyncIteration): pass\ndef solve(*args): raise S",
    "ends a generator": "class S(GeneratorExit): pass\ndef solve(*args): raise S",
    "interrupts": "class S(KeyboardInterrupt): pass\ndef solve(*args): raise S",
    "ends a loop by an index": (
        "class S:\n  def __len__(self): return 2\n  def __getitem__(self, at): raise IndexError\n"
        "  def __iter__(self): return iter(())\ndef solve(*args): return S()"
    ),
    "returns nothing to compare": "def solve(*args): return []",
    "hides its exception": (
        "class S(StopIteration):\n  def __str__(self): raise ValueError\ndef solve(*args): raise S"
    ),
    "leaves in the call": "import os\ndef solve(*args): os._exit(0)",
    "raises what the test expects not": "def solve(*args): raise SystemExit(0)",
    "pretends that the tests are broken": "def solve(*args): raise ModuleNotFoundError('numpy')",
    "returns nested data": "def solve(*args):\n  x = []\n  for _ in range(100000): x = [x]\n  return x",
    "returns a huge number": "def solve(*args): return 10 ** 100000",
    "returns not a number": "def solve(*args): return float('nan')",
}
ATTEMPTS = OUTSIDE | BLOCKING | FORGED
ENDING = [name for name, program in FORGED.items() if "raise" in program or "return []" in program]
"""Forgeries that may end a loop of the tests early."""


@pytest.fixture(scope="module")
def results(tmp_path_factory, requesting):
    """Rewards of all attempts, of a good program that runs beside them, and the file outside."""
    canary = tmp_path_factory.mktemp("outside") / "canary"
    canary.write_text("5")
    config = {"reward": "code", "case_timeout_s": 1, "processes": 12, "output_limit_kb": 256, "memory_limit_mb": 256}
    reward = CodeReward(CodeConfig.model_validate(config))
    reward.start()

    def score(program, tests):
        program = program.replace("CANARY", repr(str(canary))).replace("PARENT", str(os.getpid()))
        return reward.score(requesting(f"```python\n{program}\n```", test_cases=tests))

    try:
        with ThreadPoolExecutor(12) as threads:
            futures = {name: threads.submit(score, program, STDIN) for name, program in ATTEMPTS.items()}
            futures |= {f"{name} (call)": threads.submit(score, program, CALLS) for name, program in FORGED.items()}
            futures |= {f"{name} (code)": threads.submit(score, program, ASSERTS) for name, program in FORGED.items()}
            for kind, test in enumerate(LOOPS):
                futures |= {f"{name} (loop {kind})": threads.submit(score, FORGED[name], [test]) for name in ENDING}
            futures |= {f"good {n}": threads.submit(score, GOOD, (STDIN, CALLS, ASSERTS)[n % 3]) for n in range(9)}
            futures |= {f"good loop {n}": threads.submit(score, GOOD, [test]) for n, test in enumerate(LOOPS)}
            yield {name: future.result() for name, future in futures.items()}, canary
    finally:
        reward.close()


@NEEDS_ISOLATION
@pytest.mark.parametrize("name", ATTEMPTS)
def test_no_attempt_scores(results, name):
    found = [each for attempt, each in results[0].items() if attempt == name or attempt.startswith(f"{name} (")]
    assert [each.value for each in found] == [0.0] * len(found), found


@NEEDS_ISOLATION
def test_no_trick_of_the_integrity_kit_scores(requesting):
    reward = CodeReward(CodeConfig.model_validate({"reward": "code", "case_timeout_s": 1, "processes": 12}))
    reward.start()
    texts = [text for trick in TRICKS for text in trick.texts]
    texts += [f"```{language}\n{text}```" for trick in TRICKS for language, text in trick.programs]
    try:
        with ThreadPoolExecutor(12) as threads:
            jobs = [(text, tests) for text in texts for tests in (STDIN, CALLS, ASSERTS)]
            scored = threads.map(lambda job: reward.score(requesting(job[0], test_cases=job[1])), jobs)
            assert [job for job, each in zip(jobs, scored, strict=True) if each.value != 0.0] == []
    finally:
        reward.close()


@NEEDS_ISOLATION
def test_no_attempt_blocks_or_changes_the_others(results):
    good = {name: each for name, each in results[0].items() if name.startswith("good")}
    assert [each.value for each in good.values()] == [1.0] * (9 + len(LOOPS)), good


@NEEDS_ISOLATION
def test_nothing_outside_changed(results):
    canary = results[1]
    assert canary.read_text() == "5"
    assert [path.name for path in canary.parent.iterdir()] == ["canary"]
    assert canary.stat().st_mode & 0o777 == 0o644
    assert canary.stat().st_mtime > time.time() - 3600


@NEEDS_ISOLATION
def test_no_process_and_no_directory_is_left(requesting, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = children(os.getpid())  # of the attempts above
    reward = CodeReward(CodeConfig.model_validate({"reward": "code", "case_timeout_s": 1}))
    reward.start()
    reward.score(requesting("```\nimport time; time.sleep(1000)\n```", test_cases=STDIN))
    started = [each for each in children(os.getpid()) if each not in before]
    reward.close()
    assert started
    assert psutil.wait_procs(started, timeout=60)[1] == []
    assert list(tmp_path.iterdir()) == []


def children(parent):
    """Servers, keepers and boxes that a process has started."""
    own = str(Path(sandbox.__file__).with_name("box.py"))
    started = psutil.Process(parent).children(recursive=True)
    return [each for each in started if own in command(each)]


def command(process):
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


@NEEDS_ISOLATION
def test_boxes_end_with_a_killed_worker(tmp_path):
    script = (
        "import os, threading, time\nfrom roll_rewards.sandbox import Limits, Sandbox\n"
        "box = Sandbox(Limits(cpu_s=100))\n"
        "threading.Thread(target=box.run, args=('while True: pass', ''), daemon=True).start()\n"
        "print('running', flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout.readline() == "running\n"
        deadline = time.monotonic() + 30
        while len(started := children(worker.pid)) < 3 and time.monotonic() < deadline:  # server, keeper, box
            time.sleep(0.05)
        assert len(started) >= 3
        worker.kill()
    assert psutil.wait_procs(started, timeout=60)[1] == []


def test_a_host_without_isolation_is_refused(reward, monkeypatch):
    monkeypatch.setattr(sandbox, "probe", lambda: "landlock (Function not implemented)")
    with pytest.raises(ConfigError) as caught:
        reward(CodeReward, CodeConfig, "code")
    assert [(each.key, each.code) for each in caught.value.problems] == [("sandbox_command", "ROLL-C041")]
    assert set(CodeConfig(reward="code").check_code(None, 1.0)) == {"sandbox_command"}
    assert CodeConfig(reward="code", accept_missing_isolation=True).check_code(None, 1.0) == {}


@pytest.fixture
def kernel_without(tmp_path, monkeypatch):
    """Boxes as on a kernel without a feature: a call of `box.py` fails."""

    def lacks(*replacements):
        here = Path(sandbox.__file__).parent
        source = (here / "box.py").read_text()
        for call, failing in zip(replacements[::2], replacements[1::2], strict=True):
            assert source.count(call) == 1
            source = source.replace(call, failing)
        (tmp_path / "box.py").write_text(source)
        (tmp_path / "guest.py").write_text((here / "guest.py").read_text())
        monkeypatch.setattr(sandbox, "HERE", tmp_path)
        sandboxes.append(sandbox.Sandbox(sandbox.Limits(), accept_missing=True))
        return sandboxes[-1]

    sandboxes: list[sandbox.Sandbox] = []
    yield lacks
    for each in sandboxes:
        each.close()


@NEEDS_ISOLATION
def test_programs_without_namespaces_cannot_write_files(kernel_without):
    boxes = kernel_without("if LIBC.unshare(", "if True or LIBC.unshare(")
    assert sandbox.probe.__wrapped__() == ""
    found = boxes.layers()
    assert set(found["layers"]) == {"landlock", "seccomp"}
    assert found["missing"][0].startswith("namespaces")
    assert boxes.run("open('file', 'w').write('x')", "").status == 1
    assert boxes.run("print(input())", "in").stdout == b"in\n"


@NEEDS_ISOLATION
@pytest.mark.parametrize(
    ("layer", "call", "failing"),
    [
        ("landlock", "SYS_LANDLOCK_RESTRICT = 444, 445", "SYS_LANDLOCK_RESTRICT = 9444, 445"),
        ("seccomp", "PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22", "PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 9922"),
    ],
)
def test_without_a_required_layer_nothing_runs_unless_accepted(kernel_without, layer, call, failing):
    boxes = kernel_without(call, failing)
    assert layer in sandbox.probe.__wrapped__()
    found = boxes.layers()
    assert layer not in found["layers"]
    assert any(each.startswith(layer) for each in found["missing"])
    assert boxes.run("print(input())", "in").stdout == b"in\n"


VERSION = "version = LIBC.syscall(SYS_LANDLOCK_CREATE, None, 0, 1)"


@NEEDS_ISOLATION
@pytest.mark.parametrize("version", range(1, 8))
def test_older_versions_of_landlock_keep_files(kernel_without, version):
    kernel_without(VERSION, VERSION.replace("LIBC", f"min({version}, LIBC") + ")")
    assert sandbox.probe.__wrapped__() == ""


@NEEDS_ISOLATION
@pytest.mark.parametrize(
    ("call", "failing", "act"),
    [
        ("step(has_bits, os.O_TRUNC, 1, 0)", "step(has_bits, os.O_TRUNC, 0, 0)", "empty a library by opening it"),
        (
            "for mode in (os.O_WRONLY, os.O_RDWR)]",
            "for mode in (1, 2, 3)]",
            "empty a library by opening it for nothing",
        ),
        ("umask 95 166|", "umask 95 166|truncate 76 45|", "empty a library by its path"),
        ("umask 95 166|", "umask 95 166|openat2 437 437|", "empty a library by opening it anew"),
        ("umask 95 166|", "umask 95 166|flock 73 32|", "lock a library"),
        ("umask 95 166|", "umask 95 166|chmod 90 -|fchmodat 268 53|", "change the mode of a file"),
        ("(0, 1, 2, 3, 4, 1030, 1032)", "(0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)", "lock a part of a library"),
    ],
)
def test_the_probe_tries_what_landlock_cannot_forbid(kernel_without, call, failing, act):
    kernel_without(VERSION, VERSION.replace("LIBC", "min(1, LIBC") + ")", call, failing)
    assert repr(act) in sandbox.probe.__wrapped__()


@NEEDS_ISOLATION
def test_packages_beside_the_libraries_cannot_be_read(tmp_path, monkeypatch):
    boxes = sandbox.Sandbox(sandbox.Limits())
    try:
        source = (
            "import glob, os, sys, sysconfig\n"
            "roots = {sysconfig.get_paths()['stdlib'], sysconfig.get_config_var('LIBDIR'), '/usr/lib'}\n"
            "found = [each for root in roots for kind in ('', 'python*/') for each in\n"
            "         glob.glob(f'{root}/{kind}*-packages')]\n"
            "for name in found:\n"
            "    for file in filter(os.path.isfile, (glob.glob(f'{name}/*') + glob.glob(f'{name}/a*/*'))[:99]):\n"
            "        try: print(open(file, 'rb').read(1))\n"
            "        except PermissionError: pass\n"
            "import asyncio, decimal, sqlite3, unittest, zoneinfo\n"
            "print(zoneinfo.ZoneInfo('Europe/Berlin'))"
        )
        outcome = boxes.run(source, "")
        assert (outcome.stdout, outcome.status) == (b"Europe/Berlin\n", 0), outcome
    finally:
        boxes.close()


def test_the_probe_reports_a_box_that_leaks(monkeypatch):
    monkeypatch.setattr(sandbox, "PROBE", "print(['read a file outside'])")
    assert "read a file outside" in sandbox.probe.__wrapped__()


NAMESPACES = "unshare --map-root-user --net --pid --fork --mount-proc --ipc --uts"
"""A container without an image: util-linux puts the interpreter into namespaces of its own."""


@pytest.fixture(params=["interpreter", "namespaces", "ROLL_SANDBOX_COMMAND"])
def container(request):
    """Commands that start an interpreter, and whether they isolate it. The variable has one of a real container."""
    if request.param == "interpreter":
        return [sys.executable], False
    if request.param == "namespaces":
        found = [*NAMESPACES.split(), sys.executable]
        if not shutil.which("unshare") or subprocess.run([*found, "-c", ""], capture_output=True).returncode:
            pytest.skip("this host forbids namespaces")
    elif not (found := shlex.split(os.environ.get(request.param, ""))):
        pytest.skip(f"{request.param} is not set")
    return found, True


def test_a_command_isolates_instead(reward, requesting, container):
    code = reward(CodeReward, CodeConfig, "code", sandbox_command=container[0])
    for tests in (STDIN, CALLS, ASSERTS):
        assert code.score(requesting(f"```\n{GOOD}\n```", test_cases=tests)).value == 1.0
        assert code.score(requesting("```\nsolve = print\n```", test_cases=tests)).value == 0.0


def test_programs_of_a_command_have_its_isolation_and_limits(container):
    words, isolates = container
    boxes = sandbox.Sandbox(sandbox.Limits(output_kb=64), command=words)
    assert boxes.run("print(input())", "in").stdout == b"in\n"
    assert "output_limit_kb" in boxes.run("print('x' * 10_000_000)", "").problem
    assert boxes.run("raise SystemExit(3)", "").status == 3
    assert boxes.run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "").status in (-11, 139)
    if not isolates:
        return
    # Neither the process that keeps the program nor one outside can be signalled or reached.
    assert boxes.run("import os; os.kill(1, 9); print(os.getpid() < 99)", "").stdout == b"True\n"
    with socket.create_server(("127.0.0.1", 0)) as server:
        reached = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)"
        assert boxes.run(reached, "").status == 1


def test_a_container_ends_with_its_program_or_its_time(tmp_path, monkeypatch):
    """The client of a container is killed, not the container: a process in another session stands for it."""
    monkeypatch.setattr(sandbox, "START_S", 1.0)
    client = tmp_path / "client"
    client.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\n"
        f"at = subprocess.Popen([{sys.executable!r}, *sys.argv[1:]], start_new_session=True)\n"
        f"open({str(tmp_path / 'pids')!r}, 'a').write(f'{{at.pid}}\\n')\nat.wait()\n"
    )
    client.chmod(0o755)
    boxes = sandbox.Sandbox(sandbox.Limits(cpu_s=0.3), command=[str(client)])
    assert boxes.run("print(input())", "in").stdout == b"in\n"
    late = boxes.run("import os, time; print(os.getpid(), flush=True); time.sleep(1000)", "")
    assert "exceeded" in late.problem
    kept = [int(each) for each in ((tmp_path / "pids").read_text() + late.stdout.decode()).split()]
    assert len(kept) == 3
    deadline = time.monotonic() + 30
    while (left := [each for each in kept if psutil.pid_exists(each)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


@pytest.mark.parametrize("tests", [STDIN, CALLS, ASSERTS])
@pytest.mark.parametrize("breaks", ["exit 125", "echo no daemon; exit 125", "echo no daemon >&2; exit 0", "cat"])
def test_command_that_breaks_is_a_failure_without_a_score(reward, requesting, tmp_path, breaks, tests):
    """A container whose daemon is gone."""
    program = tmp_path / "container"
    program.write_text(f'#!/bin/sh\nif [ -e {tmp_path}/broken ]; then {breaks}; else exec {sys.executable} "$@"; fi\n')
    program.chmod(0o755)
    command = reward(CodeReward, CodeConfig, "code", sandbox_command=[str(program)])
    given = requesting(f"```\n{GOOD}\n```", test_cases=tests)
    assert command.score(given).value == 1.0
    (tmp_path / "broken").touch()
    with pytest.raises(RewardFailure):
        command.score(given)
    (tmp_path / "broken").unlink()
    assert command.score(requesting("```\nimport os; os.close(2); print(1 / 0)\n```", test_cases=tests)).value == 0.0
