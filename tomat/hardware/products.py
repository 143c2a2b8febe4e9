"""FLOPs of a training step by what is multiplied, and the least time that a chip takes for them.

A chip multiplies numbers of 8 bits at twice the rate of bfloat16, float32 at half of it or as bfloat16
(`chip_table.py`). A share of the peak is therefore a share of the time that the products would take, each at the peak
for the type of its own operands. Where all are bfloat16 that is the FLOPs over the bfloat16 peak.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

from tomat.hardware.chip_table import Operand


@dataclass(frozen=True)
class OperandTypes:
    """Of what type both operands of each kind of product are."""

    projections: Operand = "bf16"
    """The layers' projections, those of attention and of the MLP: forward."""
    input_gradients: Operand = "bf16"
    """The gradients of their inputs."""
    weight_gradients: Operand = "bf16"
    """The gradients of their weights."""
    attention: Operand = "bf16"
    """Scores, their product with the values, and the gradients of both."""
    head: Operand = "bf16"
    """Logits and their gradients."""


@dataclass(frozen=True)
class Products:
    """FLOPs by the kinds of `OperandTypes`."""

    projections: float
    input_gradients: float
    weight_gradients: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        """FLOPs of all of them."""
        return sum(vars(self).values())

    def times(self, count: int) -> "Products":
        """Of so many sequences."""
        return Products(**{name: count * flops for name, flops in vars(self).items()})

    def by_operand(self, types: OperandTypes) -> dict[Operand, float]:
        """FLOPs by the type of the operands; types that nothing is of are left out."""
        found: dict[Operand, float] = {}
        for field in fields(self):
            if flops := getattr(self, field.name):
                operand = getattr(types, field.name)
                found[operand] = found.get(operand, 0.0) + flops
        return found

    def least_seconds(self, types: OperandTypes, peak_of: Callable[[Operand], float]) -> float:
        """What the products take at the peak, each at that of its operands.

        Args:
            types: Of the operands.
            peak_of: Operands -> FLOP/s of all chips together.
        """
        return sum(flops / peak_of(operand) for operand, flops in self.by_operand(types).items())
