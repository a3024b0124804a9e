"""Former names in `intervals`, which the kernels still use."""

from pallas_fa.operands.intervals import UNBOUNDED as FAR  # noqa: F401
from pallas_fa.operands.intervals import Range as Range
from pallas_fa.operands.intervals import array_module as library  # noqa: F401
from pallas_fa.operands.intervals import maximum as maximum
from pallas_fa.operands.intervals import minimum as minimum
from pallas_fa.operands.intervals import where as where
