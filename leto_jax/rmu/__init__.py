"""The model updater: optax sliced into chunks, the log, the chunk transaction, and what to do with what a crash leaves."""
