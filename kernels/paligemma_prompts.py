"""The prompt of PaliGemma: pictures, the instruction, N action tokens.

    PICTURE × cameras <bos> INSTRUCTION [state: BINS] \\n ACTION TOKENS

Up to the action tokens that is the form PaliGemma was trained with (transformers' `PaliGemmaProcessor`). The action
tokens are its location marks, which its vocabulary has for grounding, so that a published checkpoint and the tiny base
are prompted alike.
"""

from __future__ import annotations

import copy
import re

import numpy as np
from transformers import AddedToken, PreTrainedTokenizerBase

from configs.model import BaseModelSpec
from kernels.prompts import PromptBuilder

FIRST_POSITION = 1
"""PaliGemma counts positions from one."""
_MARKS = re.compile(r"<(image|loc\d{4}|seg\d{3})>")


class PaliGemmaPrompts(PromptBuilder):
    """Prompts of one PaliGemma base.

    Args:
        tokenizer: the checkpoint's tokenizer; not changed.
        spec: gives N, the length bucket and the longest length.
        image_tokens: placeholders one picture takes.

    Raises:
        SpecError: if the tokenizer lacks one of PaliGemma's marks.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, spec: BaseModelSpec, image_tokens: int) -> None:
        super().__init__(_closed(tokenizer), spec, "PaliGemma")
        self.image_token_id = self._mark("<image>")
        self.pad_token_id = self._mark("<pad>")
        self._picture = [self.image_token_id] * image_tokens
        self._opening = self._mark("<bos>")
        self._actions = [self._mark(f"<loc{i:04}>") for i in range(spec.num_action_tokens)]

    def _prefix(self, words: str, cameras: int) -> list[int]:
        return [*self._picture * cameras, self._opening, *self._text(f"{words}\n")]

    def _positions(self, cameras: int, length: int) -> np.ndarray:
        """[1, length]; pictures count like text."""
        return FIRST_POSITION + np.arange(length)[None]


def _closed(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy that reads location and segment marks in a text as the letters they are written with.

    PaliGemma's vocabulary has them as ordinary words; only special ones are split when special tokens are.
    """
    closed = copy.deepcopy(tokenizer)
    marks = sorted(filter(_MARKS.fullmatch, tokenizer.get_added_vocab()))
    closed.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks], special_tokens=True)
    return closed
