"""HLO programs written by hand, without what every one of them has."""

from collections.abc import Mapping

from tomat.perf.profile.hlo import HloProgram
from tomat.perf.profile.hlo_files import program_from_text

OUT_OF_MEMORY = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (61.09G) exceeds "
    "available HBM (31.24G). HLO module: jit_step."
)


def text_of(entry: str, *computations: str, how: str = "") -> str:
    """A program whose entry has these lines; `how` stands behind its name, such as `is_scheduled=true`."""
    head = ", ".join(filter(None, ("HloModule m", how)))
    return "\n".join((head, *computations, f"ENTRY main {{\n{entry}\n}}"))


def program_of(entry: str, *computations: str, how: str = "") -> HloProgram:
    return program_from_text(text_of(entry, *computations, how=how), "inline")


def counted_loop(name: str, elements: Mapping[str, str], body: str, limit: str, step: int = 1, **changed: str) -> str:
    """The computations `NAME_body` and `NAME_cond` of a loop over a tuple of `elements`, name -> shape, of which the
    first counts up to `limit`, a constant or an element; `body` makes what `changed` puts in the place of others, of
    the counter `next`."""
    counter, state = next(iter(elements)), f"({', '.join(elements.values())})"
    given = [f"s = {state} parameter(0)"]
    given += [f"{one} = {shape} get-tuple-element(s), index={at}" for at, (one, shape) in enumerate(elements.items())]
    after = ", ".join(changed.get(one, one) for one in elements)
    turn = [
        f"unit = s32[] constant({step})",
        f"next = s32[] add({counter}, unit)",
        body,
        f"ROOT t = {state} tuple({after})",
    ]
    most = [] if limit in elements else [f"most = s32[] constant({limit})"]
    ends = f"ROOT p = pred[] compare({counter}, {limit if limit in elements else 'most'}), direction=LT"
    return "\n".join((f"{name}_body {{", *given, *turn, "}", f"{name}_cond {{", *given, *most, ends, "}"))
