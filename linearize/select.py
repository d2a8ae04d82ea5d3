"""Which layers keep their softmax, by measured damage: restored one after another in a student that has none.

The all-linear student is calibrated and shortly aligned. Then, round by round, each layer that is still linear gets its
softmax back for a moment, and the layer whose return brings the student closest to the teacher keeps it. Closeness is
the KL divergence of the next token on text plus that on the answers of synthetic key-value questions: text alone hardly
asks for recall, which is what softmax layers are for. The text is training text: nothing that results are measured on.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from linearize.data import Rows
from linearize.errors import UserError
from linearize.kl import Head, chunks, log_probabilities
from linearize.probes import recall_prompt, words_of
from linearize.processes import Processes
from linearize.recipe import Select, uniform_layers

Progress = Callable[[int, float], None]


@dataclass
class Questions:
    """Key-value prompts: ids [P, n] and, per prompt, the positions [P, a] whose next token is an answer."""

    ids: Tensor
    positions: Tensor

    @classmethod
    def make(cls, tokenizer, options: Select, seed: int) -> "Questions | None":
        """None when `select.questions` is 0. Raises UserError where the tokenizer has too few words."""
        if not options.questions:
            return None
        words, prompts = words_of(tokenizer), []
        for number in range(options.questions):
            # Below 0, where no seed of `linearize eval` is: results are not measured on what the choice has seen.
            made = recall_prompt(tokenizer, words, options.question_tokens, -1 - seed - number)
            if made is None:
                raise UserError(
                    "this tokenizer has too few words for key-value questions of that length",
                    value=options.question_tokens,
                    fix="lower --select-question-tokens, or --select-questions 0",
                )
            prompts.append(made)
        return cls(torch.tensor([ids for ids, _, _ in prompts]), torch.tensor([at for _, at, _ in prompts]))


class Hybrid:
    """A student of which any converted layer can be given back its softmax, and how far it then is from its teacher.

    student: as `assemble` made it, with mixers in `layers`. teacher: on the same device. rows: text. batch: tokens that
    go through a model at once.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        layers: Sequence[int],
        rows: Rows,
        questions: Questions | None,
        options: Select,
        batch: int,
    ) -> None:
        self.student, self.teacher, self.rows, self.questions = student, teacher, rows, questions
        self.options, self.batch = options, batch
        dtype = next(student.parameters()).dtype
        self.mixed = {i: student.model.layers[i].self_attn for i in layers}
        self.softmax = {}
        for i in layers:
            theirs = teacher.model.layers[i].self_attn
            # Its own weights in the student's format; the config, which names the attention function, is shared.
            own = copy.deepcopy(theirs, {id(theirs.config): theirs.config})
            self.softmax[i] = own.to(dtype).eval().requires_grad_(False)
        self.head, self.target_head = Head(student), Head(teacher)
        self.targets = [hidden for hidden, _ in self._run(teacher)]

    def _run(self, model: nn.Module) -> Iterator[tuple[Tensor, bool]]:
        """What leaves the base model at the tokens that are compared, [n, d] a batch, and whether they are answers."""
        device = next(model.parameters()).device
        step = max(1, self.batch // self.rows.context)
        for ids, positions in zip(self.rows.ids.split(step), self.rows.positions.split(step), strict=True):
            hidden = model.model(
                input_ids=ids.to(device), position_ids=positions.to(device), use_cache=False
            ).last_hidden_state
            yield hidden.flatten(0, 1), False
        if self.questions is None:
            return
        step = max(1, self.batch // self.questions.ids.shape[1])
        for ids, at in zip(self.questions.ids.split(step), self.questions.positions.split(step), strict=True):
            hidden = model.model(input_ids=ids.to(device), use_cache=False).last_hidden_state
            yield hidden[torch.arange(len(ids))[:, None], at.to(device)].flatten(0, 1), True

    @torch.no_grad()
    def damage(self, kept: Sequence[int]) -> dict[str, float]:
        """KL(teacher || student), nats a token, with softmax in the layers `kept`: of text, answers, and their sum.

        {"text", "answers", "score"}; score is text + select.answers_weight * answers.
        """
        for i in self.mixed:
            self.student.model.layers[i].self_attn = self.softmax[i] if i in kept else self.mixed[i]
        try:
            total, count = [0.0, 0.0], [0, 0]
            for (hidden, answers), theirs in zip(self._run(self.student), self.targets, strict=True):
                for part in chunks(len(hidden), self.head.vocabulary):
                    log_q = log_probabilities(self.head(hidden[part]), 1.0)
                    log_p = log_probabilities(self.target_head(theirs[part]), 1.0)
                    total[answers] += float((log_p.exp() * (log_p - log_q)).sum())
                count[answers] += len(hidden)
        finally:
            for i, mixed in self.mixed.items():
                self.student.model.layers[i].self_attn = mixed
        text, answers = (t / c if c else 0.0 for t, c in zip(total, count, strict=True))
        return {"text": text, "answers": answers, "score": text + self.options.answers_weight * answers}


def choose(hybrid: Hybrid, layers: Sequence[int], count: int, here: Processes, progress: Progress) -> dict:
    """Choose `count` of the layers to keep their softmax; the same in every process.

    select.method "greedy" measures every layer again after each choice, "once" ranks them all by their return alone.
    Processes share the candidates. progress: called with the number of measurements done and the last score. Returns
    {"kept", "order" of choice, "damage" of these, "none" (no softmax), "uniform" (the even spacing) with theirs,
    "rounds"}: per round the layers chosen and every candidate's score, the best first.
    """
    kept: list[int] = []
    rounds: list[dict] = []
    none = hybrid.damage(())
    progress(1, none["score"])
    while len(kept) < count:
        candidates = [i for i in layers if i not in kept]
        scores = [0.0] * len(candidates)
        for at in range(here.rank, len(candidates), here.world):
            scores[at] = hybrid.damage([*kept, candidates[at]])["score"]
            progress(1, scores[at])
        scores = here.sum(*scores)
        ranked = sorted(zip(scores, candidates, strict=True))
        rounds.append({"chosen": [], "scores": {str(i): round(s, 6) for s, i in ranked}})
        new = [i for _, i in ranked[: count if hybrid.options.method == "once" else 1]]
        rounds[-1]["chosen"] = new
        kept += new
    even = [layers[j] for j in uniform_layers(count, len(layers))]
    result = {
        "kept": sorted(kept),
        "order": kept,
        "damage": hybrid.damage(kept),
        "none": none,
        "uniform": {"kept": even, "damage": hybrid.damage(even)},
        "rounds": rounds,
    }
    progress(2, result["damage"]["score"])
    return result


def measurements(layers: int, count: int, method: str) -> int:
    """How many hybrids `choose` measures."""
    rounds = [layers] if method == "once" else [layers - done for done in range(count)]
    return sum(rounds) + 3
