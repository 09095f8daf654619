"""Builds tokenizers for models trained from scratch: characters, bytes, or byte pairs learnt from the data.

Also loads and compares the tokenizers of other models in a run: reward models, teachers.

Encoding is lossless for covered text: `decode(encode(text)) == text`. Characters that a `char` tokenizer does not cover
are an error, never a silent unknown token.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.errors import DataError, ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

    from roll_core.spec.config import TokenizerConfig

PAD, EOS = "<pad>", "<eos>"
"""Tokens with ids 0 and 1 in every tokenizer built here. There is no beginning-of-sequence token."""

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def stored_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """Tokenizer of the model at a directory or hub id; None if it has none.

    Raises `ModelError` if it has one that cannot be loaded.
    """
    # transformers makes an empty tokenizer for a directory without one.
    if Path(path).is_dir() and not has_tokenizer(path):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        if not has_tokenizer(path):
            return None
        raise ModelError(
            f"the tokenizer of {path} cannot be loaded: {error}; check its files, or set trust_remote_code"
        ) from error
    return tokenizer


def has_tokenizer(path: str) -> bool:
    """True if a file of a tokenizer is in the directory, or was downloaded with the model of the Hub."""
    if Path(path).is_dir():
        return any(Path(path, name).is_file() for name in TOKENIZER_FILES)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return any(isinstance(try_to_load_from_cache(path, name), str) for name in TOKENIZER_FILES)
    except HFValidationError:
        return False


CHAT_HINT = "name an instruction-tuned model with its tokenizer and chat template"


def chat_problem(folder: Path) -> str:
    """What a model's directory lacks to render chats, from its files alone; empty if nothing."""
    if not has_tokenizer(str(folder)):
        return "no tokenizer"
    return "" if stored_chat_template(folder) else "no chat template"


def stored_chat_template(folder: Path) -> str:
    """Jinja text of the chat templates in a model's directory, or in a file; empty if there is none."""
    if folder.is_file():
        return folder.read_text(encoding="utf-8", errors="replace")
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in sorted(folder.glob("chat_template*"))]
    try:
        stored = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, RecursionError, AttributeError):
        stored = None
    if stored:
        texts.append(stored if isinstance(stored, str) else json.dumps(stored, ensure_ascii=False))
    return "\n".join(texts)


def tokens_of_template(template: str) -> list[str]:
    """Texts of a Jinja chat template that become one token each: `<|…|>`."""
    return list(dict.fromkeys(re.findall(r"<\|[^|<>{}\s]+\|>", template)))


def make_tokenizer(
    config: TokenizerConfig, texts: Iterable[str], directory: Path, *, control_tokens: Sequence[str] = ()
) -> PreTrainedTokenizerBase:
    """Build the tokenizer, save it to `directory`, and return it as loaded from there by `AutoTokenizer`.

    `texts` are all texts of the data; only `bpe`, and `char` without an alphabet, read them. `control_tokens` are those
    of the chat template (see `templates.control_tokens`); each becomes one token. Raises `DataError`.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    template = Path(config.chat_template).expanduser().read_text(encoding="utf-8") if config.chat_template else None
    control_tokens = [*control_tokens, *tokens_of_template(template or "")]
    special = [PAD, EOS, *(token for token in dict.fromkeys(control_tokens) if token not in (PAD, EOS))]
    if config.kind == "char":
        built = _characters(
            config.alphabet if config.alphabet is not None else "".join(sorted(set().union(*texts))), special
        )
    elif config.kind == "byte":
        built = _bytes(special)
    else:
        built = _byte_pairs(texts, config.vocab_size, special)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = template
    directory.mkdir(parents=True, exist_ok=True)
    wrapped.save_pretrained(directory)
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    return loaded


def _characters(alphabet: str, special: Sequence[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = list(dict.fromkeys(alphabet))
    if not characters:
        raise DataError(
            "a char tokenizer needs an alphabet, but config and data have no character: set tokenizer.alphabet"
        )
    names = [*special, *characters]
    # A word-level model without an unknown token raises on unknown characters.
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def _bytes(special: Sequence[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # The character of each byte: printable bytes are themselves, the others follow Latin-1 in order, as in GPT-2.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    names = [*special, *(chr(byte) if byte in printable else chr(next(moved)) for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def _byte_pairs(texts: Iterable[str], vocab_size: int, special: Sequence[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    least = len(special) + 256
    if vocab_size < least:
        raise DataError(
            f"a bpe tokenizer has a token for each of 256 bytes and {len(special)} special tokens:"
            f" vocab_size must be at least {least}, not {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
