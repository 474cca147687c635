"""Kernels that fail: what `leto inject` runs in a trainer on a GPU. Written in PTX, which the driver compiles, so no compiler is needed."""

from __future__ import annotations

from leto_jax.arena import cuda
from leto_jax.errors import DeviceError

_PTX = """
.version 7.0
.target sm_70
.address_size 64

.visible .entry leto_illegal_address()
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    mov.u64 %rd1, 16;
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}

.visible .entry leto_trap()
{
    trap;
    ret;
}

.visible .entry leto_spin()
{
    .reg .b64 %rd<3>;
    .reg .pred %p<2>;
LOOP:
    mov.u64 %rd1, %globaltimer;
    setp.ne.u64 %p1, %rd1, 0;
    @%p1 bra LOOP;
    ret;
}
"""


def run(name: str, ordinal: int) -> None:
    """Runs `illegal_address`, `trap` or `spin` on a GPU and waits for it: the first two raise DeviceError, the last never ends.

    Crash: the first two leave the process' CUDA context unusable for good; memory behind descriptors is not touched.
    """
    with cuda.context(ordinal):
        module = cuda.call("cuModuleLoadData", _PTX.encode() + b"\0")
        function = cuda.call("cuModuleGetFunction", module, f"leto_{name}".encode())
        cuda.call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
        cuda.call("cuCtxSynchronize")
    raise DeviceError(f"the kernel leto_{name} ended well, which it should not")
