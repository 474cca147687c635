"""A probe kernel in a throw-away process: whether a new process can use a GPU. Costs a CUDA context, so it is not part of every takeover.

`python -m leto_jax.agent.probe GPU SECS` is that process: CUDA's driver, no JAX. It ends with 0 if all went well.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO

from leto_jax import errors

PROBE_SECS = 10.0
KILL_SECS = 1.0
NBYTES = 4 << 20
THREADS = 256
COMMAND = (sys.executable, "-m", "leto_jax.agent.probe")

# Inverts words: one thread for each.
_PTX = """
.version 7.0
.target sm_70
.address_size 64

.visible .entry leto_probe(.param .u64 words, .param .u32 count)
{
    .reg .b64 %rd<4>;
    .reg .b32 %r<6>;
    .reg .pred %p<2>;
    ld.param.u64 %rd1, [words];
    ld.param.u32 %r1, [count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.u32 %rd3, %r5, 4;
    add.u64 %rd2, %rd2, %rd3;
    ld.global.u32 %r1, [%rd2];
    not.b32 %r1, %r1;
    st.global.u32 [%rd2], %r1;
DONE:
    ret;
}
"""


def run(
    gpus: Sequence[int], environ: Mapping[str, str] = os.environ, secs: float = PROBE_SECS, command: Sequence[str] = COMMAND
) -> dict[int, str]:
    """What is wrong with each GPU, '' if nothing: one process for each, side by side, killed after `secs`. Never raises for what they do.

    gpus: as CUDA numbers them under `environ`. Cost: about 0.3 s for the context and the start of Python; at most `secs`, and `KILL_SECS` for each GPU
    whose process does not end even then.
    """
    deadline = time.monotonic() + secs
    with contextlib.ExitStack() as stack:
        started: dict[int, tuple[subprocess.Popen[bytes], IO[bytes]] | OSError] = {}
        for gpu in gpus:
            arguments = [*command, str(gpu), str(math.ceil(secs) + 1)]
            try:
                said = stack.enter_context(tempfile.TemporaryFile())  # no pipe: it could block
                popen = subprocess.Popen(
                    arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, env=dict(environ), start_new_session=True
                )
                started[gpu] = popen, said
            except OSError as exception:
                started[gpu] = exception
        return {
            gpu: f"a probe kernel could not be started: {found}" if isinstance(found, OSError) else _outcome(*found, secs, deadline)
            for gpu, found in started.items()
        }


def _outcome(popen: subprocess.Popen[bytes], said: IO[bytes], secs: float, deadline: float) -> str:
    try:
        code = popen.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        try:
            popen.wait(KILL_SECS)
        except subprocess.TimeoutExpired:
            return f"a probe kernel did not end within {secs:g} s, and its process {popen.pid} cannot be killed"
        return f"a probe kernel did not end within {secs:g} s"
    if code == 0:
        return ""
    said.seek(0)
    words = said.read().decode(errors="replace").strip().splitlines()
    return f"a probe kernel failed: {words[-1] if words else f'exit code {code}'}"


def use(gpu: int) -> None:
    """Makes a context, writes `NBYTES` and reads them back, inverts them with a kernel and reads them again. Raises DeviceError."""
    from leto_jax.arena import cuda

    written = random.Random(gpu).randbytes(NBYTES)
    inverted = written.translate(bytes(range(255, -1, -1)))
    words = NBYTES // 4
    with cuda.context(gpu):
        address = int(cuda.call("cuMemAlloc", NBYTES))
        buffer = ctypes.create_string_buffer(written, NBYTES)
        cuda.call("cuMemcpyHtoD", address, ctypes.addressof(buffer), NBYTES)
        _compare(gpu, address, written, "written")
        module = cuda.call("cuModuleLoadData", _PTX.encode() + b"\0")
        function = cuda.call("cuModuleGetFunction", module, b"leto_probe")
        arguments = ((address, words), (ctypes.c_void_p, ctypes.c_uint32))
        cuda.call("cuLaunchKernel", function, words // THREADS, 1, 1, THREADS, 1, 1, 0, 0, arguments, 0)
        cuda.call("cuCtxSynchronize")
        _compare(gpu, address, inverted, "computed")


def _compare(gpu: int, address: int, expected: bytes, what: str) -> None:
    from leto_jax.arena import cuda

    buffer = (ctypes.c_char * NBYTES)()
    cuda.call("cuMemcpyDtoH", ctypes.addressof(buffer), address, NBYTES)
    if buffer.raw != expected:
        raise errors.DeviceError(f"GPU {gpu}: {NBYTES >> 20} MiB do not read back as they were {what}")


def main(arguments: Sequence[str]) -> None:
    """The throw-away process: GPU, and seconds after which it ends even if nobody waits for it."""
    signal.alarm(int(arguments[1]))
    try:
        use(int(arguments[0]))
    except errors.LetoError as exception:
        sys.exit(str(exception))


if __name__ == "__main__":
    main(sys.argv[1:])
