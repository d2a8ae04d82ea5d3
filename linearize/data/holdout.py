"""Which text is held out: decided by a hash of the text alone, the same in every run, order, company and process."""

import hashlib
from collections.abc import Iterable, Iterator

from linearize.errors import UserError

# The hold-out works on pieces of at most this many characters, so that one long file has something to hold out.
PIECE = 64_000
HELDOUT_FRACTION = 0.05


class HoldOut:
    """Divides pieces of text (`cut`) into training and held-out text.

    A piece is held out when its hash, taken as a number in [0, 1), is at most `fraction`. Text that is too little for
    that rule gets an exception from `learn`: the piece with the smallest hash, or the end of the only piece.
    """

    def __init__(self, fraction: float = HELDOUT_FRACTION, seed: int = 0):
        if not 0 < fraction < 1:
            raise UserError("the held-out fraction must lie between 0 and 1", value=fraction, fix="use 0.05")
        self.fraction, self.seed = fraction, seed
        self.chosen: set[float] = set()
        self.borders: dict[float, int] = {}

    def learn(self, pieces: Iterable[str]) -> None:
        """Make sure that `pieces`, the whole of a source in any order, fall on both sides.

        Reads only as far as it must: about 20 pieces of a long source. Raises UserError for no text, for a text too
        short to be cut in two, and when everything is held out.
        """
        kept = held = False
        marks: set[float] = set()
        for piece in pieces:
            mark = self._mark(piece)
            held = held or self._held(mark) or mark in self.borders
            kept = kept or not self._held(mark)
            marks.add(mark)
            only = piece
            if kept and held and len(marks) > 1:
                return
        if not marks:
            raise UserError("there is no text to split", value="0 documents", fix="give files with text")
        if len(marks) == 1:
            self.borders[mark] = self._border(only)
        elif not kept:
            raise UserError("the hold-out leaves no text to train on", value=self.fraction, fix="lower the fraction")
        elif not held:
            self.chosen.add(min(marks))

    def split(self, piece: str) -> tuple[str, str]:
        """Return (training text, held-out text) of a piece; one of them is empty but for the only piece of a source."""
        mark = self._mark(piece)
        if mark in self.borders:
            return piece[: self.borders[mark]], piece[self.borders[mark] :]
        return ("", piece) if self._held(mark) else (piece, "")

    def _held(self, mark: float) -> bool:
        return mark <= self.fraction or mark in self.chosen

    def _mark(self, text: str) -> float:
        key = str(self.seed).encode()
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=key).digest()
        return int.from_bytes(digest, "big") / 2**64

    def _border(self, text: str) -> int:
        border = line_end_before(text, max(1, round(len(text) * (1 - self.fraction))))
        if not text[:border].strip() or not text[border:].strip():
            raise UserError("the text is too short to hold a part out", value=text[:40], fix="give more text")
        return border


def split_documents(
    documents: Iterable[str], heldout_fraction: float = HELDOUT_FRACTION, seed: int = 0
) -> tuple[list[str], list[str]]:
    """Split documents into (train, heldout); about `heldout_fraction` of them are held out.

    The side is decided by a hash of the text alone: the same text falls on the same side in every run, in any order
    and any company, and a duplicate never straddles the two. Documents over 64 000 characters are first cut at line
    ends. When the hash holds out nothing, the piece with the smallest hash is held out; a single piece gives its end.

    Raises UserError for a fraction outside (0, 1) and for data without text.
    """
    hold = HoldOut(heldout_fraction, seed)
    pieces = [piece for text in documents for piece in cut(text, PIECE)]
    hold.learn(pieces)
    sides = [hold.split(piece) for piece in pieces]
    return [train for train, _ in sides if train], [heldout for _, heldout in sides if heldout]


def line_end_before(text: str, limit: int) -> int:
    """The last line end at or before `limit`, else the last space, else `limit` itself; never 0."""
    for mark in ("\n", " "):
        border = text.rfind(mark, 1, limit) + 1
        if border > 1:
            return border
    return limit


def cut(text: str, limit: int) -> Iterator[str]:
    """Pieces of at most `limit` characters, cut at line ends where there are any; blank ones are left out."""
    start = 0
    while len(text) - start > limit:
        border = start + line_end_before(text[start : start + limit + 1], limit)
        if text[start:border].strip():
            yield text[start:border]
        start = border
    if text[start:].strip():
        yield text[start:]
