"""Source code of a module with functions that misbehave in every way that a candidate can."""

from pathlib import Path

CANDIDATES = r"""
import ctypes, os, subprocess, sys, time
import numpy as np

def right(x, *, factor):
    return x * factor

def raises(x, *, factor):
    raise RuntimeError("no such\nkernel")

def hangs(x, *, factor):
    time.sleep(1000)

def crashes(x, *, factor):
    print("out of registers", file=sys.stderr, flush=True)
    os.abort()

def leaves(x, *, factor):
    sys.exit(3)

def writes(x, *, factor):
    x *= factor
    return x

def prints(x, *, factor):
    print("hello")
    os.write(1, b"hello again")
    return x

def two(x, *, factor):
    return x, (x > 0)

def nothing(x, *, factor):
    return None

def swapped(x, *, factor):
    return (x * factor).astype(x.dtype.newbyteorder(">"))

def leave_a_daemon():
    daemon = os.fork()
    if daemon == 0:
        os.setsid()
        time.sleep(1000)
        os._exit(0)
    with open("daemons", "a") as file:
        print(daemon, file=file)

def daemon(x, *, factor):
    leave_a_daemon()
    os._exit(5)

def leaves_a_daemon(x, *, factor):
    leave_a_daemon()
    return x * factor

def into_the_pipe(data):
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, data)
        except OSError:
            pass

def garbage(x, *, factor):
    into_the_pipe(b"garbage, garbage, garbage")
    return x

def forged(x, *, factor):
    import json
    header = json.dumps([[{"dtype": "float32", "shape": [1], "bytes": 1 << 50}], [], None, None]).encode()
    into_the_pipe(len(header).to_bytes(8, "little") + header + bytes(100))
    return x

def forged_header(x, *, factor):
    into_the_pipe((1 << 60).to_bytes(8, "little") + bytes(100))
    return x

def forged_nest(x, *, factor):
    header = b"[" * 100000
    into_the_pipe(len(header).to_bytes(8, "little") + header)
    return x

def forged_dtype(x, *, factor):
    import json
    header = json.dumps([[{"dtype": "\x1b[2Jfoo", "shape": [1], "bytes": 4}], [], None, None]).encode()
    into_the_pipe(len(header).to_bytes(8, "little") + header + bytes(4))
    return x

def answers_first_and_hangs(x, *, factor):
    import json
    header = json.dumps([[{"dtype": "float32", "shape": [1], "bytes": 4}], [], None, None]).encode()
    into_the_pipe(len(header).to_bytes(8, "little") + header + bytes(4))
    time.sleep(1000)

def forges_and_answers(x, *, factor):
    import json
    header = json.dumps([[{"dtype": "float32", "shape": [1], "bytes": 4}], [], None, None]).encode()
    into_the_pipe(len(header).to_bytes(8, "little") + header + bytes(4))
    return x

def escapes(x, *, factor):
    raise RuntimeError("\x1b[31mred\x1b]0;title\x07")

def escapes_and_dies(x, *, factor):
    print("\x1b[2Jgone", file=sys.stderr, flush=True)
    os._exit(4)

def prints_escapes(x, *, factor):
    print("\x1b[31mfirst\nsecond\ttab")
    return x

def imports(x, *, factor):
    import no_such_library_here
    return x

def reads_stdin(x, *, factor):
    assert sys.stdin.read() == ""
    subprocess.run(["cat"], check=True)  # as a compiler may, which must find no requests there
    return x * factor

class Namespace:
    right = staticmethod(right)

number = 3
"""


def daemons(folder: Path) -> list[int]:
    """List the process ids of daemons that candidates started; the daemons survive the tests."""
    pid_file = folder / "daemons"
    return [int(line) for line in pid_file.read_text().split()] if pid_file.exists() else []
