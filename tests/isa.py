"""The suite as other processors compile it: `make test-isa`, or this file with pytest's arguments.

XLA compiles for the processor it finds. With fewer vector instructions, or with two threads, the
same program adds in another order, and its last digits differ. Prints one line per setting, and the
tests that failed below it; exit code 1 if there are any.
"""

import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
X86 = platform.machine().lower() in ("x86_64", "amd64")
# A set that this processor lacks is the same as its own.
SETS = [f"--xla_cpu_max_isa={name}" for name in ("SSE4_2", "AVX2", "AVX512")] if X86 else [""]
THREADS = [f"--xla_cpu_multi_thread_eigen={threads}" for threads in ("false", "true")]


def seconds() -> float:
    """Processor seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(arguments: list[str]) -> int:
    failed = 0
    for flags in [f"{threads} {name}".strip() for name in SETS for threads in THREADS]:
        words = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *arguments]
        before, environment = seconds(), os.environ | {"XLA_FLAGS": flags}
        done = subprocess.run(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        *lines, result = done.stdout.splitlines()
        print(f"{flags}: {result}, {seconds() - before:.0f} processor seconds", flush=True)
        print(*(f"  {line}" for line in lines if line.startswith(("FAILED", "ERROR"))), sep="\n")
        failed |= done.returncode
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
