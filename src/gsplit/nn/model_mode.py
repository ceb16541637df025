"""How a model stands: training or not, and which parameters are trained. It must be the same on every rank.

``model.eval()`` on one rank only, or a parameter frozen there only, would pass unseen or hang in backward. So the text
made here travels with the collective of every loss (``batch.mean``, ``batch.sum``), which is compared between ranks.
"""

import torch
from torch.nn import Module, Parameter

__all__ = ["ModelMode"]

_MOST_NAMES = 3
_LIST_EVERY = 50  # forwards: walking a model takes longer than looking at its flags


class ModelMode:
    """Says how one model stands; looks at every flag in every forward, and makes the text anew if one has changed."""

    def __init__(self) -> None:
        self._seen: tuple[object, ...] = ()
        self._text = ""
        self._modules: list[Module] = []
        self._parameters: list[Parameter] = []
        self._num_forwards = 0

    def describe(self, model: Module) -> str:
        """Such as ``training, 4 of 6 parameters trained, not convs.0.lin_l.weight, convs.0.lin_l.bias``."""
        if self._num_forwards % _LIST_EVERY == 0:
            self._modules, self._parameters = list(model.modules()), list(model.parameters())
        self._num_forwards += 1
        training = [module.training for module in self._modules]
        trained = [parameter.requires_grad for parameter in self._parameters]
        seen = (training, trained, torch.is_grad_enabled())
        if seen != self._seen:
            self._seen, self._text = seen, _text(model, training, trained)
        return self._text


def _text(model: Module, training: list[bool], trained: list[bool]) -> str:
    mode = "training" if all(training) else "evaluating"
    if any(training) and not all(training):
        names = [name or "the model" for name, module in model.named_modules() if not module.training]
        mode = f"training but for {_some(names)}"
    text = f"{mode}, {sum(trained)} of {len(trained)} parameters trained"
    if not all(trained):
        text += f", not {_some([name for name, p in model.named_parameters() if not p.requires_grad])}"
    return text if torch.is_grad_enabled() else f"{text}, without gradients"


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
