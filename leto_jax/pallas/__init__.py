"""GPU kernels: Reed-Solomon encode and decode, page checksums, and an optimizer update that guards what it writes in the same pass.

| file | what it holds |
|---|---|
| `reference` | each operation in plain XLA: what the kernels must equal, to the bit |
| `parity`, `fused` | the kernels, with their settings |
| `words`, `mosaic` | arithmetic on words of four bytes; the few things that Pallas itself does not offer |
| `shapes` | named shapes, for tests and benchmarks |
| `dispatch` | whether a kernel can be used on a device, and why not |

The kernels import nothing of leto_jax: coefficients of the code come in as tuples of ints, the elementwise update as a Python function over
arrays. They are written for Mosaic GPU (Hopper and later); elsewhere callers use their XLA forms (`rmp.codec`).
"""
