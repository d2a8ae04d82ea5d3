"""Functions of tensors as CUDA graphs: on a small model the time of a step is the time of launching its kernels."""

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

WARM = 2  # plain runs of a shape before it is captured: kernels compile and check themselves, gradients are allocated
GRAPHS = 8  # kept; rows with another number of documents, or of another length, need one of their own


def used_here(tree: Any) -> None:
    """Keep the memory of the tensors in lists, tuples and dicts for what their GPU's current stream does with them."""
    for x in tree_leaves(tree):
        if isinstance(x, Tensor) and x.is_cuda:
            x.record_stream(torch.cuda.current_stream(x.device))


class Aside:
    """Work beside what a GPU is busy with: code that waits for the device waits for its own kernels alone.

    It may read what the current stream was given to write before the Aside was made, and nothing that is written later.
    What it returns may be used by the current stream from then on. On a CPU it is a plain call.
    """

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def __call__(self, run: Callable[..., Any], *args) -> Any:
        if self.stream is None:
            return run(*args)
        current = torch.cuda.current_stream(self.stream.device)
        with torch.cuda.stream(self.stream):
            result = run(*args)
        current.wait_stream(self.stream)
        used_here(result)
        return result


class Replay:
    """``run`` as it is, or on a GPU, from the third call with the same shapes on, as one launch.

    run only enqueues work: nothing comes to the host, and shapes follow from the shapes of the arguments. Its results
    are overwritten by the next call, whatever its shapes. Gradients that it adds up must exist when it is captured and
    stay where they are: clear them with ``set_to_none=False``, or call :meth:`forget`. Where capture fails, with a
    warning, run is called as it is.

    Arguments are tensors, numbers, None, and lists, tuples and dicts of them; tensors are copied to fixed places.
    """

    def __init__(self, run: Callable[..., Any], *, enabled: bool = True):
        self.run, self.enabled = run, enabled and torch.cuda.is_available()
        # Plain runs on the stream of the capture: compiled code may belong to the stream that it first ran on.
        self.stream = torch.cuda.Stream() if self.enabled else None
        self.forget()

    def forget(self) -> None:
        """Drop all graphs."""
        self.seen: Counter = Counter()
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, list[Tensor], Any]] = {}
        self.pool = None

    def __call__(self, *args) -> Any:
        leaves, layout = tree_flatten(args)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if not self.enabled or not tensors or not all(x.is_cuda for x in tensors):
            return self.run(*args)
        key = (str(layout), *((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in leaves))
        if key not in self.graphs:
            self.seen[key] += 1
            if self.seen[key] <= WARM:
                return self._aside(args)
            stream = torch.cuda.current_stream()
            try:
                self.graphs[key] = self._capture(leaves, layout)
            except RuntimeError as error:
                torch.cuda.set_stream(stream)  # what ends a capture may raise before it has put the stream back
                torch.cuda.synchronize()
                self.enabled = False
                self.forget()
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                warnings.warn(
                    f"steps run one kernel at a time, as CUDA graphs are not possible: {reason}", stacklevel=2
                )
                return self.run(*args)
            if len(self.graphs) > GRAPHS:
                self.graphs.pop(next(iter(self.graphs)))
        graph, places, result = self.graphs[key]
        torch._foreach_copy_(places, tensors)
        graph.replay()
        return result

    def _aside(self, args: tuple) -> Any:
        """Run on the stream of the capture, as what is captured has to be warmed up."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = self.run(*args)
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def _capture(self, leaves: list, layout) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Any]:
        fixed = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            result = self.run(*tree_unflatten(fixed, layout))
        # One memory for all: they never run at the same time, and nobody keeps a result beyond the next call.
        self.pool = self.pool or graph.pool()
        return graph, [x for x in fixed if isinstance(x, Tensor)], result
