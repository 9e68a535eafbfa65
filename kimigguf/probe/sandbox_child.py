"""The inside of the sandbox: shuts this process in, then runs the code and its test. Started by ``probe.sandbox``.

Run as ``python -I -S -B sandbox_child.py FOLDER CPU_SECONDS MEMORY_BYTES FILE_BYTES OPEN_FILES`` with the password of
the run on standard input. It imports the standard library only, and nothing of this package: the package's folder is
out of its reach once it has shut itself in.

Sources: seccomp(2), landlock(7), and the kernel's headers for the numbers (linux/seccomp.h, linux/filter.h,
linux/audit.h, linux/landlock.h, asm/unistd.h).
"""

import ctypes
import os
import platform
import struct
import sys
import sysconfig
from pathlib import Path

READY = "ready"
"""Said before the code runs: this process has shut itself in."""
PASSED = "passed "

_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_CLONE_THREAD = 0x00010000
_X32_BIT = 0x40000000

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED = {
    # Sockets of any kind (those of other programs on this machine are a way out too), and the ring that opens them.
    # A pair of them stays, for asyncio is built on one: see below for what it may not send.
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "io_uring_setup": (425, 425),
    "sendmsg": (46, 211), "sendmmsg": (307, 269),
    # Other processes: new ones, signals to them, looking into them.
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "kill": (62, 129), "tkill": (200, 130), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "setpriority": (141, 140), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "prlimit64": (302, 261), "process_madvise": (440, 440),
    # What outlives the process, or belongs to the whole machine.
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "fsopen": (430, 430), "move_mount": (429, 429),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "open_by_handle_at": (304, 265),
    # What Landlock leaves open: attributes of files that can be named, and (before its third version) their length.
    "truncate": (76, 45),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "chroot": (161, 51), "quotactl": (179, 60), "swapon": (167, 224), "reboot": (169, 142),
    "init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104), "sethostname": (170, 161),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "acct": (163, 89), "syslog": (103, 116),
}  # fmt: skip
"""System calls that are refused, with their numbers on x86-64 and AArch64 (None: there is none)."""
_CLONE, _CLONE3, _TGKILL, _SENDTO = (56, 220), (435, 435), (234, 131), (44, 206)
_REFUSED_WAYS = {
    # Whom a file's events are told to, and by which signal: by that any process of this user could be ended.
    "fcntl": ((72, 25), (8, 10, 15)),  # F_SETOWN, F_SETSIG, F_SETOWN_EX
    "ioctl": ((16, 29), (0x8901, 0x8902)),  # FIOSETOWN, SIOCSPGRP
}
"""System calls of which the second argument must not be one of these."""
_CAPABILITIES_3 = 0x20080522

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULESET_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_FILE_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}
"""All that Landlock can forbid about files, by its version."""
_NOT_IN_ROOM = 0x1E40 | 0x2000 | 0x8000 | 0x0080
"""No devices, sockets, pipes and links are made there, nothing is moved in or out, and no folders: a thousand of them
within each other would be hard to remove."""
_CPU_GRACE_SECONDS = 1


def missing() -> "str | None":
    """What this system lacks to shut a process in; None where it has it all."""
    if sys.platform != "linux":
        return "there is no way here to cut a process off from the network"
    if platform.machine() not in _ARCHITECTURES or sys.maxsize < 2**32:
        return f"the system calls of {platform.machine()} are not known, so the network cannot be cut off"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(21, 0, 0, 0, 0) < 0:
        return "this kernel has no seccomp, so the network cannot be cut off"
    if libc.syscall(_CREATE_RULESET, None, 0, _RULESET_VERSION) < 1:
        return "this kernel has no Landlock, so other files cannot be kept out of reach"
    return None


def _limit(cpu_seconds: int, memory: int, file_bytes: int, files: int) -> None:
    import resource  # noqa: PLC0415 -- not there on every system, and `missing` is asked on all

    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + _CPU_GRACE_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # seccomp refuses new processes already; this is for threads, and holds for everybody but root.
    resource.setrlimit(resource.RLIMIT_NPROC, (256, 256))


def _keep_out_of_files(libc: ctypes.CDLL, room: str) -> None:
    """Landlock: read Python's own files, use ``room``; all else is out of reach."""
    version = libc.syscall(_CREATE_RULESET, None, 0, _RULESET_VERSION)
    rights = _FILE_RIGHTS.get(version, _FILE_RIGHTS[5])
    attributes = struct.pack("=Q", rights)
    rules = libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if rules < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    readable = {sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values(), "/usr/share/zoneinfo"}
    readable -= {"/", "/usr", str(Path.home())}
    readable |= {"/usr/lib", "/usr/local/lib", "/lib", "/lib64", "/dev/urandom", "/etc/localtime"}
    for path in sorted(readable):
        _allow(libc, rules, path, _READ_FILE | (_READ_DIR if Path(path).is_dir() else 0))
    _allow(libc, rules, "/dev/null", _READ_FILE | _WRITE_FILE)
    _allow(libc, rules, room, rights & ~_EXECUTE & ~_NOT_IN_ROOM)
    if libc.syscall(_RESTRICT_SELF, rules, 0) != 0:
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(rules)


def _allow(libc: ctypes.CDLL, rules: int, path: str, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what is not there needs no leave
    if libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", rights, opened), 0) != 0:
        raise OSError(ctypes.get_errno(), f"landlock_add_rule {path}")
    os.close(opened)


def _give_up_powers(libc: ctypes.CDLL) -> None:
    """What root may do more than others (mounts, clocks, limits): none of it, and no program can be run to get it."""
    if libc.capset(struct.pack("=Ii", _CAPABILITIES_3, 0), bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _keep_out_of_calls(libc: ctypes.CDLL) -> None:
    """seccomp: refuse the calls above; a new thread is allowed, a new process is not."""
    which = list(_ARCHITECTURES).index(platform.machine())
    program = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, _ARCHITECTURES[platform.machine()]),
        (_RETURN, 0, 0, _KILL),  # 32-bit calls have other numbers
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _REFUSE | _ENOSYS),
    ]
    for numbers in _REFUSED.values():
        if (number := numbers[which]) is not None:
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE | _EPERM)]
    for pair, values in _REFUSED_WAYS.values():
        program += [(_EQUAL, 0, 2 * len(values) + 2, pair[which]), (_LOAD, 0, 0, _FIRST_ARGUMENT_AT + 8)]
        for value in values:
            program += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _REFUSE | _EPERM)]
        program += [(_RETURN, 0, 0, _ALLOW)]
    # To nobody but the other end: a datagram with an address would reach every program that listens on a path.
    program += [
        (_EQUAL, 0, 6, _SENDTO[which]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT + 4 * 8),
        (_EQUAL, 0, 3, 0),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT + 4 * 8 + 4),
        (_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE | _EPERM),
    ]
    # The C library takes this for an old kernel and falls back to clone, whose flags can be seen from here.
    program += [(_EQUAL, 0, 1, _CLONE3[which]), (_RETURN, 0, 0, _REFUSE | _ENOSYS)]
    program += [
        (_EQUAL, 0, 4, _CLONE[which]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_HAS_BITS, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _REFUSE | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 4, _TGKILL[which]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_EQUAL, 1, 0, os.getpid()),
        (_RETURN, 0, 0, _REFUSE | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ALLOW),
    ]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    header = struct.pack("@HP", len(program), ctypes.addressof(filters))
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


def _main(folder: str, cpu_seconds: int, memory: int, file_bytes: int, files: int) -> None:
    token = sys.stdin.read()
    code, test = (Path(folder, name).read_text(encoding="utf-8") for name in ("code.py", "test.py"))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs")
    _keep_out_of_files(libc, str(Path(folder, "room")))
    _limit(cpu_seconds, memory, file_bytes, files)
    _give_up_powers(libc)
    _keep_out_of_calls(libc)
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    names: dict[str, object] = {"__name__": "answer"}
    exec(compile(code, "answer", "exec"), names)  # noqa: S102 -- what this whole program is for
    exec(compile(test, "test", "exec"), names)  # noqa: S102 -- as above
    sys.stdout.write(f"\n{PASSED}{token}\n")
    sys.stdout.flush()
    os._exit(0)  # what the code left to be done at exit is not waited for


if __name__ == "__main__":
    _main(sys.argv[1], *map(int, sys.argv[2:]))
