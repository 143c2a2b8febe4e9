"""The speed lab: measures training steps on this machine's devices, each setting in its own process."""
