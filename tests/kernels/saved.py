"""What an operator keeps for its backward pass is taken out once."""

import torch


def taken_once():
    """Context: taking a saved tensor out twice is an error, as it is under activation checkpointing."""

    def unpack(kept):
        tensor, taken = kept
        assert not taken, "a saved tensor is taken out twice, which activation checkpointing forbids"
        taken.append(True)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor, []), unpack)
