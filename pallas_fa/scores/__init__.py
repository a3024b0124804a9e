"""Scores: functions of the scaled logits, before the softmax. `then` composes them."""

from pallas_fa.scores.alibi import Alibi as Alibi
from pallas_fa.scores.base import Chain as Chain
from pallas_fa.scores.base import Score as Score
from pallas_fa.scores.bias import Bias as Bias
from pallas_fa.scores.custom import Custom as Custom
from pallas_fa.scores.relative_bias import RelativeBias as RelativeBias
from pallas_fa.scores.soft_cap import SoftCap as SoftCap

__all__ = ["Alibi", "Bias", "Chain", "Custom", "RelativeBias", "Score", "SoftCap"]
