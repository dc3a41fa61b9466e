"""A library that moves the clock of the programs that load it (``LD_PRELOAD``), and leaves the monotonic one.

libfaketime 0.9.10 can't do this: with it, Python 3.11's ``time.sleep`` fails (EINVAL).
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long moved(void) { const char *s = getenv("CLOCK_MOVED_S"); return s ? atol(s) : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += moved();
    return code;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *out, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""


def clock_moved_by(seconds: int, folder: Path) -> dict[str, str]:
    """Return the environment of a program whose clock is ``seconds`` fast. Skip the test without a C compiler."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(_SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "CLOCK_MOVED_S": str(seconds)}
