"""What a pass returns."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class PassResult:
    """Nodes a pass changed, and how many it looked at and left alone, by reason."""

    changed: int = 0
    left: Counter[str] = field(default_factory=Counter)
