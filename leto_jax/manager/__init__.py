"""The state manager: a process without JAX that owns all retained memory, and the client of it.

Standard library only: nothing here imports jax or numpy, so the manager starts fast, stays small and outlives whatever they do.
Floors, from the ground: `protocol` (framed messages), `runtime` (directories), `limits` and `memory` (what may be reserved, and reserving
it), `fence` (death of every process of an incarnation), `store` (what is kept), `server` (the process), `client` (everybody else).
"""
