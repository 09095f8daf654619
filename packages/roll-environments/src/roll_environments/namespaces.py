"""Directories and namespaces that stand in for a container: `container: local` of the environment `harbor`.

    python namespaces.py start FOLDER             makes the directories of an episode
    python namespaces.py exec FOLDER MOUNTS [--workdir=DIRECTORY] PROGRAM...
    python namespaces.py stop FOLDER              kills all programs and waits for their end
    python namespaces.py remove FOLDER            stops them and removes the directories

A program sees the host's system directories read-only, and those of the episode: /app, /tests, /logs, /tmp. It runs in
a process namespace of its own, as an unprivileged user. The namespace ends with the program, and with it all processes
of the program. The network is the host's. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import sys
import time

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWIPC = 0x20000, 0x10000000, 0x20000000, 0x08000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 0x1000, 0x4000, 1 << 18
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt")
DEVICES = ("null", "zero", "full", "random", "urandom")
OWN = ("app", "tests", "logs", "solution", "tmp")
"""Directories of an episode, below `/`."""
NOBODY = 65534
VARIABLES = tuple(f"{api}_{name}" for api in ("OPENAI", "ANTHROPIC") for name in ("BASE_URL", "API_KEY", "MODEL"))
"""Environment variables that programs get. Others of the host may be secrets."""
STOP_S = 30.0
"""Maximum seconds to wait for the end of killed programs."""


def main(action: str, folder: str, *words: str) -> int:
    """Run an action. Returns its exit code."""
    if action == "start":
        for name in (*OWN, "logs/verifier", "logs/agent", "logs/artifacts"):
            os.makedirs(os.path.join(folder, "data", name), exist_ok=True)
        os.makedirs(os.path.join(folder, "programs"))
        os.makedirs(os.path.join(folder, "root"))
        if os.geteuid() == 0:
            for path, _, _ in os.walk(os.path.join(folder, "data")):
                os.chown(path, NOBODY, NOBODY)
    elif action == "exec":
        workdir = words[1].partition("=")[2] if words[1].startswith("--workdir=") else ""
        command = list(words[2:] if workdir else words[1:])
        return execute(folder, json.loads(words[0]), workdir or "/app", command)
    elif action in ("stop", "remove"):
        stop(folder)
        if action == "remove":
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def execute(folder: str, mounts: dict[str, str], workdir: str, command: list[str]) -> int:
    """Run a program in namespaces of its own."""
    uid, gid = os.geteuid(), os.getegid()
    _checked(LIBC.unshare(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | (CLONE_NEWUSER if uid else 0)), "unshare")
    if uid:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        if not os.read(reading, 1):  # the parent was killed before it registered this process
            os._exit(1)
        os.close(reading)
        try:
            code = _first_process(folder, mounts, workdir, command)
        except OSError as error:
            os.write(2, f"namespaces: {error}\n".encode())
            code = 125
        os._exit(code)
    with open(os.path.join(folder, "programs", str(child)), "w", encoding="ascii") as file:
        file.write(_started(child))
    os.write(writing, b"1")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _first_process(folder: str, mounts: dict[str, str], workdir: str, command: list[str]) -> int:
    """Make the root directory, run the program, and reap processes until it ends. All others end with this one."""
    root, data = os.path.join(folder, "root"), os.path.join(folder, "data")
    _checked(LIBC.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "mount")
    _checked(LIBC.mount(b"tmpfs", os.fsencode(root), b"tmpfs", MS_NOSUID | MS_NODEV, b"mode=0755"), "mount of tmpfs")
    top = workdir.strip("/").partition("/")[0]
    if not os.path.isdir(data + workdir):
        os.makedirs(data + workdir)
        for path, _, _ in os.walk(f"{data}/{top}") if os.geteuid() == 0 else ():
            os.chown(path, NOBODY, NOBODY)
    for name in dict.fromkeys((*OWN, top)):
        _bind(f"{data}/{name}", f"{root}/{name}")
    for source, name in {**{name: name for name in SYSTEM}, **mounts}.items():
        if os.path.islink(source):
            os.symlink(os.readlink(source), root + name)
        elif os.path.exists(source) and not os.path.exists(root + name):
            _bind(source, root + name, read_only=True)
    for name in DEVICES:
        _bind(f"/dev/{name}", f"{root}/dev/{name}")
    os.makedirs(f"{root}/proc")
    LIBC.mount(b"proc", os.fsencode(f"{root}/proc"), b"proc", MS_NOSUID | MS_NODEV, None)  # not in all containers
    os.chroot(root)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    os.chdir(workdir)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _checked(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    program = os.fork()
    if program == 0:
        try:
            variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
            path = f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin"
            os.environ["PATH"] = path  # which `execvpe` searches
            os.execvpe(command[0], command, {"PATH": path, "HOME": "/tmp", "LANG": "C.UTF-8"} | variables)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
            os._exit(127)
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):  # they close with the programs
        os.dup2(nothing, fd)
    while True:
        pid, status = os.wait()
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _bind(source: str, target: str, *, read_only: bool = False) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w", encoding="ascii"):
            pass
    flags = MS_BIND | (MS_REC if read_only else 0)
    _checked(LIBC.mount(os.fsencode(source), os.fsencode(target), None, flags, None), f"mount of {source}")
    if read_only:
        flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID
        if LIBC.mount(None, os.fsencode(target), None, flags, None):
            # In a user namespace, the flags of the source may not be removed.
            _checked(LIBC.mount(None, os.fsencode(target), None, flags | MS_NODEV, None), f"mount of {source}")


def stop(folder: str) -> None:
    """Kill the first process of each namespace, and wait until all processes of the namespaces have ended."""
    programs = os.path.join(folder, "programs")
    for name in os.listdir(programs) if os.path.isdir(programs) else ():
        path = os.path.join(programs, name)
        with contextlib.suppress(ProcessLookupError):
            ended = os.pidfd_open(int(name))
            with open(path, encoding="ascii") as file:
                if file.read() == _started(int(name)):  # otherwise another process has the number
                    signal.pidfd_send_signal(ended, signal.SIGKILL)
                    poll = select.poll()
                    poll.register(ended, select.POLLIN)
                    # The kernel reports the end of a first process after that of all others.
                    if not poll.poll(STOP_S * 1000):
                        raise TimeoutError(f"process {name} did not end within {STOP_S:g} s")
            os.close(ended)
        os.unlink(path)


def _started(pid: int) -> str:
    """When a process started, in ticks since the start of the machine. Empty if there is none."""
    for _ in range(2):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[19]
        time.sleep(0.001)
    return ""


def _checked(result: int, doing: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{doing}: {os.strerror(code)}")


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except OSError as problem:
        sys.stderr.write(f"namespaces: {problem}\n")
        sys.exit(125)
