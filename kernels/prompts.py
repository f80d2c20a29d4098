"""The prompt around an observation: one picture a camera, the instruction, N action tokens at the end.

What a family's form is stands in a file of its own; here is what all of them share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from transformers import PreTrainedTokenizerBase

from configs.errors import SpecError, TenantFault, refusal
from configs.model import BaseModelSpec

STATE_INTRODUCTION = " state:"


@dataclass(frozen=True, eq=False)
class Prompt:
    """One tokenised prompt, not padded.

    Attributes:
        ids: int64 [L].
        positions: int64 [3, L], temporal, height and width positions as the library's `get_rope_index` has them; [1, L]
            in families whose positions are one number.
        action_start: index of the first action token; N of them follow one another.
    """

    ids: np.ndarray
    positions: np.ndarray
    action_start: int


class PromptBuilder(ABC):
    """Tokenises prompts for one base; equal prompts are built once.

    Args:
        tokenizer: the checkpoint's tokenizer.
        spec: gives N, the length bucket and the longest length.
        family: whose tokenizers have the marks that are asked for.

    Attributes:
        build: the prompt of (instruction, number of cameras, text of the state or None); TenantFault if it is too long.
        image_token_id: the placeholder of which a picture has one a token.
        pad_token_id: what fills a row up.
    """

    image_token_id: int
    pad_token_id: int
    _actions: list[int]

    def __init__(self, tokenizer: PreTrainedTokenizerBase, spec: BaseModelSpec, family: str) -> None:
        self._tokenizer = tokenizer
        self._spec = spec
        self._family = family
        self.build: Callable[[str, int, str | None], Prompt] = lru_cache(maxsize=4096)(self._build)

    def bucket(self, length: int) -> int:
        """`length` rounded up to the bucket."""
        step = self._spec.length_bucket
        return -(-length // step) * step

    @abstractmethod
    def _prefix(self, words: str, cameras: int) -> list[int]:
        """Tokens of pictures and words: all that stands before the action tokens."""

    @abstractmethod
    def _positions(self, cameras: int, length: int) -> np.ndarray:
        """int64 [3 or 1, length], rotary positions of a prompt."""

    def _build(self, instruction: str, cameras: int, state_text: str | None) -> Prompt:
        words = instruction if state_text is None else f"{instruction}{STATE_INTRODUCTION}{state_text}"
        prefix = self._prefix(words, cameras)
        ids = [*prefix, *self._actions]
        length = self.bucket(len(ids))
        if length > self._spec.max_length:
            raise TenantFault(
                refusal(
                    "instruction",
                    f"a prompt of {length} tokens ({cameras} cameras, {len(self._text(words))} tokens of text)",
                    f"at most {self._spec.max_length} tokens on base {self._spec.name!r}",
                    "shorten the instruction or use fewer cameras",
                )
            )
        return Prompt(np.array(ids, np.int64), self._positions(cameras, len(ids)), len(prefix))

    def _mark(self, mark: str) -> int:
        token = self._tokenizer.convert_tokens_to_ids(mark)
        if not isinstance(token, int) or token == self._tokenizer.unk_token_id:
            possible = f"a tokenizer of the {self._family} family"
            raise SpecError(refusal("tokenizer", mark, possible, "choose another base model"))
        return token

    def _text(self, text: str) -> list[int]:
        # split_special_tokens: a tenant's instruction cannot smuggle in placeholders or action tokens.
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
