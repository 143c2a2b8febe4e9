"""Which teacher a model in few bits learns from, what of it is trained, and by which loss."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from tomat.base.errors import TomatError

TrainedPart = Literal["mlp", "all"]


@dataclass(frozen=True)
class DistillationConfig:
    """Training of a model in few bits on the distributions of its teacher (`tomat train --teacher`).

    A density position costs temperature^2 times the Kullback-Leibler divergence of the student's distribution over the
    density bins from the teacher's, both of logits over the temperature (Hinton et al., arXiv 1503.02531), and
    `data_weight` times the loss that `loss` says of the data. The teacher reads what the student reads, and is
    computed in the same step.
    """

    teacher: str
    """Run, or folder of weights, of the same vocabulary, codec and layout."""
    quantised: str
    """Folder of weights that `tomat compress` wrote, with which the training begins."""
    train: TrainedPart = "all"
    """`mlp`: codes, scales and tables of the MLPs alone; `all`: of every matrix in few bits, and the arrays that are
    whole. What is not trained has no optimizer state and is not in the checkpoints."""
    top_k: int = 256
    """Bins of the teacher's distribution that are told apart, the most probable ones; the others are one mass."""
    temperature: float = 1.0
    """What the logits of both are divided by."""
    data_weight: float = 1.0
    """Of the data's own loss; 0: the teacher alone."""

    def __post_init__(self) -> None:
        for name in ("teacher", "quantised"):
            if not getattr(self, name):
                raise TomatError(f"distillation.{name} is empty; give a folder.")
        if self.train not in get_args(TrainedPart):
            raise TomatError(f"distillation.train is '{self.train}'; expected one of mlp, all.")
        if self.top_k < 1:
            raise TomatError(f"distillation.top_k is {self.top_k}; expected at least 1.")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise TomatError(f"distillation.temperature is {self.temperature}; expected a positive number.")
        if not (math.isfinite(self.data_weight) and self.data_weight >= 0):
            raise TomatError(f"distillation.data_weight is {self.data_weight}; expected 0 or more.")
