"""Softmax attention of rows that are known to be one document each: causal without a mask, in captured graphs as well.

transformers looks at the positions to see whether rows are packed, and leaves the mask away where they are not. While
a CUDA graph is captured it cannot look and makes a mask, with which attention takes a few times longer, and which
compiled layers have not seen before. Whoever knows the rows says so with :func:`whole_rows`, and plain calls then do
as captured ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "linearize_causal"  # the attention implementation, "sdpa" otherwise

_whole: ContextVar[bool | None] = ContextVar("whole", default=None)


@contextmanager
def whole_rows(known: bool | None) -> Iterator[None]:
    """Inside, models with the attention NAME take their rows for single, unpadded documents, or for packed ones.

    known: True for whole rows, which have no mask; False for packed ones, which have one even if all of them happen to
    be whole; None leaves it to transformers to look.
    """
    token = _whole.set(known)
    try:
        yield
    finally:
        _whole.reset(token)


def _mask(*args, **kwargs) -> Tensor | None:
    whole, window = _whole.get(), kwargs.get("local_size")
    if whole and (window is None or kwargs["q_length"] <= window):
        return None
    if whole is False:
        # Laid out as a packed row's: compiled layers tell strides apart.
        return sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False}).contiguous()
    return sdpa_mask(*args, **kwargs)


def attention(softmax: str) -> str:
    """The name to ask transformers for in place of the implementation `softmax`, the same attention."""
    return NAME if softmax == "sdpa" else softmax


ALL_ATTENTION_FUNCTIONS.register(NAME, sdpa_attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
