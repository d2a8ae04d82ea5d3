"""Turns softmax attention layers of a pretrained language model into linear-time mixers."""

__version__ = "0.1.0"
