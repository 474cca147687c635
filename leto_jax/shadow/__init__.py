"""The shadow trainer: executables that are loaded instead of compiled, prewarming, promotion, attaching to retained memory."""
