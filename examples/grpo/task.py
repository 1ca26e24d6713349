"""The task: the prompt's last token names a class, the answer should hold tokens of that class only.

A tiny model learns it from random weights within minutes, and a line of code verifies it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAD, BOS, EOS = 0, 1, 2
NUM_CLASSES = 4
FIRST_COMMAND = 4
FIRST_WORD = 8
VOCAB_SIZE = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassTask:
    """Prompts of min_words..max_words random words, then a command; rewards are shares of right tokens.

    Args:
        max_new_tokens: the longest answer; a shorter one (ended by EOS) counts as wrong where tokens are missing.
    """

    min_words: int = 3
    max_words: int = 8
    max_new_tokens: int = 12

    @property
    def max_tokens(self) -> int:
        """The longest prompt and answer together."""
        return 2 + self.max_words + self.max_new_tokens

    def prompts(self, count: int, *, seed: int) -> list[Tensor]:
        """Return `count` prompts, [length] int64 each."""
        generator = torch.Generator().manual_seed(seed)
        prompts = []
        for _ in range(count):
            length = int(torch.randint(self.min_words, self.max_words + 1, (), generator=generator))
            words = torch.randint(FIRST_WORD, VOCAB_SIZE, (length,), generator=generator)
            command = torch.randint(FIRST_COMMAND, FIRST_COMMAND + NUM_CLASSES, (1,), generator=generator)
            prompts.append(torch.cat([torch.tensor([BOS]), words, command]))
        return prompts

    def reward(self, prompt: Tensor, answer: Tensor) -> float:
        """Return the share of `max_new_tokens` that are words of the commanded class, 0..1."""
        wanted = int(prompt[-1]) - FIRST_COMMAND
        right = (answer >= FIRST_WORD) & (answer % NUM_CLASSES == wanted)
        return float(right.sum()) / self.max_new_tokens
