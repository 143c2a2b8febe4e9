"""A trace.json as JAX's profiler names its events."""

from typing import Any


def chrome_events(steps: int, shift_us: float = 0.0) -> list[dict[str, Any]]:
    """Steps of 10 us, every 20 us, the first at `shift_us`, of two operations on a TPU; and a host that waits."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 3, "name": "process_name", "args": {"name": "/device:TPU:0 (pid 3)"}},
        {"ph": "M", "pid": 9, "name": "process_name", "args": {"name": "/host:CPU"}},
    ]
    for tid, name in ((1, "Steps"), (2, "XLA Modules"), (3, "XLA Ops")):
        events.append({"ph": "M", "pid": 3, "tid": tid, "name": "thread_name", "args": {"name": name}})
    details = {"hlo_category": "convolution fusion", "tf_op": "jit(step)/jvp(M)/LlamaMlp/dot_general:", "flops": "100"}
    for step in range(steps):
        at = shift_us + 20 * step
        events += [
            {"ph": "X", "pid": 3, "tid": 1, "name": str(step), "ts": at, "dur": 10, "args": {}},
            {"ph": "X", "pid": 3, "tid": 2, "name": "jit_step(9)", "ts": at, "dur": 10, "args": {"run_id": "1"}},
            {"ph": "X", "pid": 3, "tid": 3, "name": "fusion.1", "ts": at, "dur": 6, "args": details},
            {"ph": "X", "pid": 3, "tid": 3, "name": "copy.2", "ts": at + 6, "dur": 3.5, "args": None},
            {"ph": "X", "pid": 9, "tid": 1, "name": "wait", "ts": at + 9, "dur": 8},
        ]
    return events
