"""Process that runs untrusted programs, each in a restricted process of its own. Imports only the standard library.

    worker (sandbox.Sandbox)         server (this file)             box
      request, 4 descriptors  ─────►   fork ─► keeper ─ fork ─────►   restrict itself, then `guest.main()`
                                              kills it at the deadline, or once the worker hangs up
                            status ◄───────── reports its exit

The server has one thread, no data of the run, and no descriptors but its socket. A box inherits its interpreter, so
that a program starts within milliseconds. Layers of the restriction, from the program's point of view:

- seccomp: only system calls on the list below. No sockets, processes, signals to others, mounts, tracing, kernel keys,
  file locks.
- Landlock: files of the interpreter's and the system's libraries are readable, no others, and no packages. Before Linux
  6.2 it cannot forbid that opening a file empties it: seccomp does.
- resource limits: processor time, memory, threads, file sizes, descriptors.
- namespaces, where the kernel permits them: process ids, and an empty `tmpfs` of limited size as working directory.
  Without them the working directory is read-only.

The first two are required: see `sandbox.probe`.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import glob
import json
import os
import platform
import resource
import select
import signal
import socket
import struct
import sys
import sysconfig
from functools import cache
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
NUM_FDS = 4
"""Descriptors of a request: standard input, output and error of the program, and the keeper's connection."""
MAX_REQUEST = 4096
MAX_THREADS = 64
FIRST_UID = 50_000
"""Real user ids of boxes if the server runs as root; the kernel counts the threads of each."""

# number on x86_64, number on aarch64 (- if it does not exist there)
SYSCALLS = """
read 0 63|write 1 64|close 3 57|fstat 5 80|lseek 8 62|mmap 9 222|mprotect 10 226|munmap 11 215|brk 12 214
rt_sigaction 13 134|rt_sigprocmask 14 135|rt_sigreturn 15 139|pread64 17 67|pwrite64 18 68|readv 19 65|writev 20 66
access 21 -|faccessat 269 48|faccessat2 439 439|pipe 22 -|pipe2 293 59|select 23 -|pselect6 270 72|poll 7 -
ppoll 271 73|sched_yield 24 124|mremap 25 216|madvise 28 233|msync 26 227|mincore 27 232|dup 32 23|dup2 33 -
dup3 292 24|pause 34 -|nanosleep 35 101|clock_nanosleep 230 115|getitimer 36 102|setitimer 38 103|alarm 37 -
getpid 39 172|getppid 110 173|gettid 186 178|exit 60 93|exit_group 231 94|uname 63 160|fsync 74 82
fdatasync 75 83|ftruncate 77 46|getdents64 217 61|getcwd 79 17|chdir 80 49|fchdir 81 50
stat 4 -|lstat 6 -|newfstatat 262 79|statx 332 291|rename 82 -|renameat 264 38|renameat2 316 276|mkdir 83 -
mkdirat 258 34|rmdir 84 -|unlink 87 -|unlinkat 263 35|readlink 89 -|readlinkat 267 78|umask 95 166|gettimeofday 96 169
time 201 -|times 100 153|getrlimit 97 163|setrlimit 160 164|getrusage 98 165|sysinfo 99 179|getuid 102 174
geteuid 107 175|getgid 104 176|getegid 108 177|getresuid 118 148|getresgid 120 150|getgroups 115 158|getpgrp 111 -
getpgid 121 155|getsid 124 156|getpriority 140 141|sigaltstack 131 132|statfs 137 43|fstatfs 138 44|arch_prctl 158 -
futex 202 98|futex_waitv 449 449|set_tid_address 218 96|sched_getaffinity 204 123|sched_getparam 143 121
sched_getscheduler 145 120|sched_get_priority_max 146 125|sched_get_priority_min 147 126|set_robust_list 273 99
get_robust_list 274 100|clock_gettime 228 113|clock_getres 229 114|rt_sigpending 127 136|rt_sigtimedwait 128 137
rt_sigsuspend 130 133|restart_syscall 219 128|epoll_create 213 -|epoll_create1 291 20|epoll_wait 232 -
epoll_pwait 281 22|epoll_ctl 233 21|eventfd2 290 19|getrandom 318 278|getcpu 309 168|rseq 334 293|membarrier 324 283
fadvise64 221 223|fallocate 285 47|close_range 436 436|wait4 61 260
"""
# Allowed if an argument has one of these values: name, numbers, index of the argument, values (None: the process's id).
BY_ARGUMENT: tuple[tuple[str, int, int, int, tuple[int | None, ...]], ...] = (
    (
        "ioctl",
        16,
        29,
        1,
        (0x5401, 0x5413, 0x541B, 0x5450, 0x5451),
    ),  # is it a terminal, its size, bytes to read, cloexec
    ("fcntl", 72, 25, 1, (0, 1, 2, 3, 4, 1030, 1032)),  # not F_SETOWN, which sends signals, and no locks
    ("kill", 62, 129, 0, (None,)),
    ("tgkill", 234, 131, 0, (None,)),
    ("prlimit64", 302, 261, 0, (0,)),
)
OPEN = (((2, 1), (257, 2)), ((56, 2),))
"""Numbers of `open` and `openat`, and the indices of their flags."""
CLONE, CLONE3 = (56, 220), (435, 435)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column in `SYSCALLS` and AUDIT_ARCH of each supported machine."""

CLONE_THREAD = 0x10000
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x10000000, 0x20000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWPID  # seccomp already denies what network and IPC namespaces would separate
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 0x4000, 1 << 18
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446
SYS_CAPSET = (126, 91)
READ_FILE, READ_DIRECTORY = 1 << 2, 1 << 3
"""Rights that Landlock grants."""


def main() -> None:
    """Serve requests from the socket whose descriptor is the argument, until the worker closes it."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers report to the worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "guest.py"), encoding="utf-8") as file:
        guest = compile(file.read(), "guest", "exec")
    options = json.loads(sys.argv[2])
    readable()  # once for all boxes
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    while True:
        request, fds, _, _ = socket.recv_fds(connection, MAX_REQUEST, NUM_FDS)
        if not request:
            return
        if os.fork() == 0:
            connection.close()
            try:
                keep(json.loads(request) | options, fds, guest)
            finally:
                os._exit(0)
        for fd in fds:
            os.close(fd)


def keep(request: dict[str, Any], fds: list[int], guest: Any) -> None:
    """Start a box, wait for its exit, and report it on the last descriptor. Kill it at the deadline."""
    control = fds[3]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    layers, missing = enter_namespaces(request)
    parent = os.getpid()
    started, finished = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(started)
        try:
            restrict(request, layers, missing, parent)
            os.write(finished, json.dumps({"layers": layers, "missing": missing}).encode())
        except BaseException as error:
            os.write(finished, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
            os._exit(1)
        os.close(finished)
        _run_guest(fds, guest)
    os.close(finished)
    for fd in fds[:3]:
        os.close(fd)
    # The box has not run the program yet. It writes this message before that.
    (report,) = [b"".join(iter(lambda: os.read(started, 4096), b""))]
    with contextlib.suppress(OSError):
        os.write(control, report + b"\n")
    ended = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(control, select.POLLIN)
    late = not poll.poll(request["wall_s"] * 1000)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    cpu_s = usage.ru_utime + usage.ru_stime
    message = {"status": os.waitstatus_to_exitcode(status), "late": late, "cpu_s": cpu_s}
    with contextlib.suppress(OSError):  # the worker has hung up
        os.write(control, json.dumps(message).encode() + b"\n")


def enter_namespaces(request: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Move this process into namespaces of its own, and the next child into one of process ids, if permitted."""
    uid, gid = os.geteuid(), os.getegid()
    # Root needs no user namespace, and outside of one it can give each box a user of its own.
    if LIBC.unshare(NAMESPACES | (CLONE_NEWUSER if uid else 0)):
        return [], [f"namespaces ({os.strerror(ctypes.get_errno())})"]
    if uid:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    _checked(LIBC.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "mount")
    size = request["scratch_mb"]
    options = f"size={size}m,nr_inodes=4096,mode=0700,uid={uid},gid={gid}".encode()
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    _checked(LIBC.mount(b"tmpfs", os.fsencode(request["scratch"]), b"tmpfs", flags, options), "mount of the scratch")
    return ["namespaces"], []


def restrict(request: dict[str, Any], layers: list[str], missing: list[str], parent: int) -> None:
    """Restrict this process for good. `layers` and `missing` receive the layers that are in force, or not."""
    machine = ARCHITECTURES.get(platform.machine())
    has_namespaces = "namespaces" in layers
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if not has_namespaces and os.getppid() != parent:
        os._exit(1)
    os.chdir(request["scratch"])
    os.setsid()
    threads = has_namespaces  # of an unprivileged user: counted in its user namespace only
    if os.geteuid() == 0:
        threads = _become_nobody(os.getpid() if not has_namespaces else parent)
    if not threads:
        missing.append("threads (they cannot be counted here, so programs cannot start any)")
    _set_limits(request, threads)
    if machine is not None:
        # Version 3 of the header; no capability is effective, permitted or inheritable.
        header, data = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0] * 6)
        _checked(LIBC.syscall(SYS_CAPSET[machine[0]], header, data), "capset")
    _checked(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    _note("landlock", _landlock(request, writable=has_namespaces), layers, missing)
    reason = f"not supported on {platform.machine()}" if machine is None else _seccomp(*machine, threads=threads)
    _note("seccomp", reason, layers, missing)
    required = {"landlock", "seccomp"} - set(layers)
    if required and not request["accept_missing"]:
        raise OSError(f"isolation is not given: {'; '.join(missing)}")


def _note(layer: str, problem: str, layers: list[str], missing: list[str]) -> None:
    if problem:
        missing.append(f"{layer} ({problem})")
    else:
        layers.append(layer)


def _become_nobody(number: int) -> bool:
    """Change the real user, which owns threads; the effective one still reads the interpreter's libraries."""
    try:
        os.setgroups([])
        os.setresuid(FIRST_UID + number % 10_000, 0, 0)
    except OSError:
        return False
    return True


def _set_limits(request: dict[str, Any], threads: bool) -> None:
    limits = {
        resource.RLIMIT_AS: request["memory_mb"] << 20,
        resource.RLIMIT_CPU: request["cpu_s"],
        resource.RLIMIT_FSIZE: request["scratch_mb"] << 20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if threads:
        limits[resource.RLIMIT_NPROC] = MAX_THREADS
    for name, limit in limits.items():
        resource.setrlimit(name, (limit, limit))


@cache
def readable() -> dict[str, int]:
    """Rights to the directories and files that programs may read: the standard library, shared libraries, time zones.

    Packages among the libraries are not readable. Landlock cannot take a right back, so the directories above them may
    only be listed, and each of their other entries is readable.
    """
    names = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/localtime", "/dev/urandom"]
    paths = sysconfig.get_paths()
    names += [paths["stdlib"], paths["platstdlib"], str(sysconfig.get_config_var("LIBDIR"))]
    roots = list(dict.fromkeys(os.path.realpath(name) for name in names if os.path.exists(name)))
    packages = {os.path.realpath(paths[name]) for name in ("purelib", "platlib")}
    for root in roots:
        for kind in ("site-packages", "dist-packages"):
            packages |= {*glob.glob(f"{root}/{kind}"), *glob.glob(f"{root}/python*/{kind}")}
    rights: dict[str, int] = {}
    while roots:
        name = roots.pop()
        if name in packages or os.path.islink(name):  # what a link names has its own right, or none
            continue
        rights[name] = READ_FILE | READ_DIRECTORY if os.path.isdir(name) else READ_FILE
        if any(package.startswith(f"{name}/") for package in packages):
            rights[name] = READ_DIRECTORY
            roots += [os.path.join(name, entry) for entry in os.listdir(name)]
    return rights


def _landlock(request: dict[str, Any], *, writable: bool) -> str:
    """Deny every file but the readable ones and the scratch directory. Returns why not, or an empty text."""
    version = LIBC.syscall(SYS_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return f"{os.strerror(ctypes.get_errno())}; Linux 5.13 has it"
    num_rights = 13 + (version >= 2) + (version >= 3) + (version >= 5)
    every = (1 << num_rights) - 1
    write_file, read = 1 << 1, READ_FILE | READ_DIRECTORY
    attributes = struct.pack("QQQ", every, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    attributes = attributes[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = LIBC.syscall(SYS_LANDLOCK_CREATE, attributes, len(attributes), 0)
    _checked(ruleset, "landlock_create_ruleset")
    rules = [*readable().items(), *((name, read) for name in request["paths"])]
    scratch = read | write_file | (1 << 4) | (1 << 5) | (1 << 7) | (1 << 8)  # remove and make files and directories
    scratch |= (1 << 14 if version >= 3 else 0) | (1 << 13 if version >= 2 else 0)
    rules += [(request["scratch"], scratch if writable else READ_DIRECTORY), ("/dev/null", READ_FILE | write_file)]
    for name, rights in rules:
        parent = os.open(name, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights, parent)
        _checked(LIBC.syscall(SYS_LANDLOCK_ADD, ruleset, 1, rule, 0), f"Landlock's rule for {name}")
        os.close(parent)
    _checked(LIBC.syscall(SYS_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)
    return ""


def _seccomp(column: int, audit_arch: int, *, threads: bool) -> str:
    """Deny every system call that is not listed. Returns why not, or an empty text."""
    program = seccomp_filter(column, audit_arch, threads=threads, pid=os.getpid())
    code = array.array("B", program)
    address, _ = code.buffer_info()

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    if LIBC.prctl(PR_SET_SECCOMP, 2, ctypes.byref(Filter(len(program) // 8, address)), 0, 0):
        return os.strerror(ctypes.get_errno())
    return ""


def seccomp_filter(column: int, audit_arch: int, *, threads: bool, pid: int) -> bytes:
    """Classic BPF over `struct seccomp_data`: number at 0, architecture at 4, low word of argument i at 16 + 8 i."""
    load, equal, has_bits, mask, give = 0x20, 0x15, 0x45, 0x54, 0x06
    allow, kill = 0x7FFF0000, 0x80000000
    denied, missing = 0x00050000 | 1, 0x00050000 | 38  # EPERM, ENOSYS: libraries then use older calls

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    out = [step(load, 4), step(equal, audit_arch, 1, 0), step(give, kill), step(load, 0)]
    for entry in SYSCALLS.replace("\n", "|").strip("|").split("|"):
        number = entry.split()[1 + column]
        if number != "-":
            out += [step(equal, int(number), 0, 1), step(give, allow)]
    for call, flags in OPEN[column]:
        # Truncation needs a right to write, except for Landlock before its version 3 if the file is not opened for it.
        modes = [step(equal, mode, 0, 1) + step(give, allow) for mode in (os.O_WRONLY, os.O_RDWR)]
        body = [step(load, 16 + 8 * flags), step(has_bits, os.O_TRUNC, 1, 0), step(give, allow)]
        body += [step(mask, os.O_WRONLY | os.O_RDWR), *modes, step(give, denied)]
        out += [step(equal, call, 0, len(b"".join(body)) // 8), *body]
    for _, *numbers, argument, values in BY_ARGUMENT:
        tests = [step(equal, pid if value is None else value, 0, 1) + step(give, allow) for value in values]
        out += [step(equal, numbers[column], 0, 2 * len(tests) + 2), step(load, 16 + 8 * argument), *tests]
        out += [step(give, denied)]
    if threads:
        out += [step(equal, CLONE[column], 0, 4), step(load, 16), step(has_bits, CLONE_THREAD, 0, 1)]
        out += [step(give, allow), step(give, denied)]
    out += [step(equal, CLONE3[column], 0, 1), step(give, missing), step(give, denied)]
    return b"".join(out)


def _run_guest(fds: list[int], guest: Any) -> None:
    """Run `guest.main()` with the program's standard streams; no other descriptor stays open."""
    for target, fd in enumerate(fds[:3]):
        os.dup2(fd, target)
    os.closerange(3, 64)
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGINT else signal.SIG_IGN)
    sys.argv = ["program"]
    names: dict[str, Any] = {"__name__": "guest"}
    try:
        exec(guest, names)
        names["main"]()
    finally:
        os._exit(1)


def _checked(result: int, doing: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{doing}: {os.strerror(code)}")


if __name__ == "__main__":
    main()
