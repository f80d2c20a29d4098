"""The prompt of Qwen3-VL: its chat form, one picture a camera, the instruction, N action tokens.

    <|im_start|>user\n (<|vision_start|> picture <|vision_end|>) × cameras INSTRUCTION [state: BINS]<|im_end|>\n
    <|im_start|>assistant\n ACTION TOKENS

The action tokens are marks that Qwen's own vocabulary has for grounding, so that a published checkpoint and the
tiny base are prompted alike. They stand last: causal attention lets them see everything, and padding on the right
is seen by nothing.
"""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from configs.model import BaseModelSpec
from kernels.prompts import PromptBuilder

ACTION_MARKS = (
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
)


class Qwen3VlPrompts(PromptBuilder):
    """Prompts of one Qwen3-VL base.

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
        super().__init__(tokenizer, spec, "Qwen")
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

    def _prefix(self, words: str, cameras: int) -> list[int]:
        return [*self._opening, *self._picture * cameras, *self._text(words), *self._closing]

    def _positions(self, cameras: int, length: int) -> np.ndarray:
        """Text counts on by one in all three; a picture counts on by its longer side in merged patches."""
        rows, columns = self._grid
        positions = np.empty((3, length), np.int64)
        index, position = 0, 0

        def text(count: int) -> None:
            nonlocal index, position
            positions[:, index : index + count] = position + np.arange(count)
            index, position = index + count, position + count

        text(len(self._opening))
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
