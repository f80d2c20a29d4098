"""The prompt around an observation: Qwen's chat form, one picture a camera, the instruction, N action tokens.

    <|im_start|>user\n (<|vision_start|> picture <|vision_end|>) × cameras INSTRUCTION [state: BINS]<|im_end|>\n
    <|im_start|>assistant\n ACTION TOKENS

The action tokens are marks that Qwen's own vocabulary has for grounding, so that a published checkpoint and the
tiny base are prompted alike. They stand last: causal attention lets them see everything, and padding on the right
is seen by nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from transformers import PreTrainedTokenizerBase

from configs.errors import SpecError, TenantFault, refusal
from configs.model import BaseModelSpec

ACTION_MARKS = (
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
)
STATE_INTRODUCTION = " state:"


@dataclass(frozen=True, eq=False)
class Prompt:
    """One tokenised prompt, not padded.

    Attributes:
        ids: int64 [L].
        positions: int64 [3, L], temporal, height and width positions as the library's `get_rope_index` has them.
        action_start: index of the first action token; N of them follow one another.
    """

    ids: np.ndarray
    positions: np.ndarray
    action_start: int


class PromptBuilder:
    """Tokenises prompts for one base; equal prompts are built once.

    Args:
        tokenizer: the checkpoint's tokenizer.
        spec: gives N, the length bucket and the longest length.
        image_tokens: placeholders one picture takes.
        image_grid: height and width of a picture in merged patches.

    Raises:
        SpecError: if the tokenizer lacks one of Qwen's marks.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, spec: BaseModelSpec, image_tokens: int, image_grid: tuple[int, int]
    ) -> None:
        self._tokenizer = tokenizer
        self._spec = spec
        self._image_tokens = image_tokens
        self._grid = image_grid
        self.image_token_id = self._mark("<|image_pad|>")
        self.pad_token_id = self._mark("<|endoftext|>")
        self._opening = [self._mark("<|im_start|>"), *self._text("user\n")]
        self._picture = [
            self._mark("<|vision_start|>"),
            *[self.image_token_id] * image_tokens,
            self._mark("<|vision_end|>"),
        ]
        self._closing = [
            self._mark("<|im_end|>"),
            *self._text("\n"),
            self._mark("<|im_start|>"),
            *self._text("assistant\n"),
        ]
        marks = [self._mark(mark) for mark in ACTION_MARKS]
        self._actions = [marks[i % len(marks)] for i in range(spec.num_action_tokens)]
        self.build: Callable[[str, int, str | None], Prompt] = lru_cache(maxsize=4096)(self._build)

    def _mark(self, mark: str) -> int:
        token = self._tokenizer.convert_tokens_to_ids(mark)
        if not isinstance(token, int) or token == self._tokenizer.unk_token_id:
            raise SpecError(refusal("tokenizer", mark, "a tokenizer of the Qwen family", "choose another base model"))
        return token

    def _text(self, text: str) -> list[int]:
        # split_special_tokens: a tenant's instruction cannot smuggle in placeholders or action tokens.
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def _build(self, instruction: str, cameras: int, state_text: str | None) -> Prompt:
        words = instruction if state_text is None else f"{instruction}{STATE_INTRODUCTION}{state_text}"
        text = self._text(words)
        ids = [*self._opening, *self._picture * cameras, *text, *self._closing]
        length = self.bucket(len(ids) + len(self._actions))
        if length > self._spec.max_length:
            raise TenantFault(
                refusal(
                    "instruction",
                    f"a prompt of {length} tokens ({cameras} cameras, {len(text)} tokens of text)",
                    f"at most {self._spec.max_length} tokens on base {self._spec.name!r}",
                    "shorten the instruction or use fewer cameras",
                )
            )
        positions = self._positions(len(self._opening), cameras, len(ids) + len(self._actions))
        return Prompt(np.array([*ids, *self._actions], np.int64), positions, len(ids))

    def _positions(self, opening: int, cameras: int, length: int) -> np.ndarray:
        """Text counts on by one in all three; a picture counts on by its longer side in merged patches."""
        rows, columns = self._grid
        positions = np.empty((3, length), np.int64)
        index, position = 0, 0

        def text(count: int) -> None:
            nonlocal index, position
            positions[:, index : index + count] = position + np.arange(count)
            index, position = index + count, position + count

        text(opening)
        for _ in range(cameras):
            text(1)
            picture = slice(index, index + self._image_tokens)
            positions[0, picture] = position
            positions[1, picture] = position + np.repeat(np.arange(rows), columns)
            positions[2, picture] = position + np.tile(np.arange(columns), rows)
            index, position = picture.stop, position + max(rows, columns)
            text(1)
        text(length - index)
        return positions

    def bucket(self, length: int) -> int:
        """`length` rounded up to the bucket."""
        step = self._spec.length_bucket
        return -(-length // step) * step
