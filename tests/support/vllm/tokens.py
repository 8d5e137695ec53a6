"""The generated models' tokenizer: every byte, the commonest pairs of letters, and nothing that another machine could train otherwise."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

VOCAB_SIZE = 512
SPECIAL = ("<s>", "</s>")
_LETTERS = "etaoinshrdlcumwf"
_FIRST_PAIR = len(SPECIAL) + 256
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}\n{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    """Token ids whose text is whole at any cut: pairs of letters. Other bytes may end a prompt inside a character."""
    draw = random.Random(seed)
    return [draw.randrange(_FIRST_PAIR, VOCAB_SIZE) for _ in range(num_tokens)]


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and a chat template. Every id below VOCAB_SIZE has a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    room = VOCAB_SIZE - len(SPECIAL) - len(alphabet)
    merges = list(itertools.islice(itertools.product(_LETTERS, repeat=2), room))
    words = [*SPECIAL, *alphabet, *map("".join, merges)]
    assert len(set(words)) == VOCAB_SIZE
    assert words[_FIRST_PAIR] == "".join(merges[0])
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
