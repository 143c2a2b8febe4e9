"""The loss of a student in few bits: its teacher's distributions, and the data."""

from dataclasses import dataclass

import equinox as eqx
import jax
from jaxtyping import PRNGKeyArray
from levanter.metrics import Metric
from levanter.models.lm_model import LmHeadModel
from levanter.utils.tree_utils import inference_mode

from tomat.model.any_decoder import hidden_and_head
from tomat.model.loss.density_loss import density_loss
from tomat.model.loss.teacher import teacher_divergence
from tomat.predict.distillation.arrays import TrainedArrays
from tomat.predict.weights.arrays import stacked_model
from tomat.train.loader import TokenExample
from tomat.train.settings.config import TrainConfig
from tomat.train.settings.schema import DistillationConfig
from tomat.train.step import DensityLossFunction, mean_metrics


class StudentAndTeacher(eqx.Module):
    """What the trainer holds of a distillation."""

    student: TrainedArrays
    teacher: LmHeadModel | None


@dataclass(frozen=True, eq=False)
class DistillationLoss:
    """`loss_fn(model, example, key=None) -> (loss, metrics)` as Levanter's trainer calls it."""

    config: TrainConfig
    distillation: DistillationConfig
    data: DensityLossFunction
    """The loss of the data, and what the model is told of them."""

    def __call__(
        self, model: StudentAndTeacher, example: TokenExample, *, key: PRNGKeyArray | None = None
    ) -> tuple[jax.Array, dict[str, Metric]]:
        """Loss of one (micro)batch, a float32 scalar, and its metrics: those of the data's loss, and `teacher_kl_nats`.

        Args:
            example: `tokens`, int32 `[batch, position]`, and for models that read them `atoms`.
            key: Randomness of `density_dropout`; None: every row is read whole, by both.
        """
        settings, data = self.distillation, self.data
        tokens, unread, key = data.read(example.tokens, key)
        student = stacked_model(model.student.values(), self.config)
        hidden, head = hidden_and_head(student, tokens, example.atoms, data.environment, key=key)
        loss, metrics = density_loss(
            hidden, head, example.tokens, config=data.config, target=data.target, unread=unread
        )
        assert model.teacher is not None
        teacher = inference_mode(model.teacher, True)
        kl = teacher_divergence(
            (hidden, head),
            hidden_and_head(teacher, tokens, example.atoms, data.environment),
            example.tokens,
            target=data.target,
            top_k=settings.top_k,
            temperature=settings.temperature,
            block_positions=data.config.block_positions,
        )
        total = settings.temperature**2 * kl + settings.data_weight * loss
        return total, mean_metrics({**metrics, "data_loss": loss, "teacher_kl_nats": kl})
