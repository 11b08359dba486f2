"""Text to token ids and back, and chat rendering, from a vocabulary alone."""

import codecs
import functools
import json
import re
import warnings
from collections.abc import Iterable
from datetime import datetime

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BpeTokenizer

from m2r2_jax.text.vocabulary import Vocabulary

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TIKTOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Names of split rules, which are llama.cpp's (tokenizer.ggml.pre): patterns, each of
# which splits the pieces the one before left.
_PRE_TOKENIZERS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "llama-bpe": (_TIKTOKEN % r"\p{N}{1,3}",),
    "qwen2": (_TIKTOKEN % r"\p{N}",),
    "smollm": (r"\p{N}", _GPT2),
    "tekken": (_TEKKEN,),
}
_ALIASES = {
    **dict.fromkeys(("llama3", "llama-v3", "falcon3"), "llama-bpe"),
    **dict.fromkeys(
        ("phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"), "gpt-2"
    ),
    "megrez": "qwen2",
}
# Rules with which a piece that is a token stays whole, whatever the merges say, and
# with which text begins with BOS unless the file says otherwise (llama.cpp's loader).
_WHOLE_PIECES = ("llama-bpe", "tekken")
# A control token may be spelled like one of these: templates compare roles with them.
_ROLES = ("system", "user", "assistant", "tool")
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
# GPT-2's alphabet: the bytes that do not print are shifted to the characters from 256.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_SHIFTED = enumerate(sorted(set(range(256)) - set(_PRINTABLE)))
_BYTES = {chr(b): b for b in _PRINTABLE} | {chr(256 + i): b for i, b in _SHIFTED}


class Tokenizer:
    """A model's byte-level BPE vocabulary and its chat template.

    Control tokens (`<|im_start|>`) come from text only where the caller asks for it.

    Attributes:
        bos_id: id of the beginning-of-sequence token, None when the model has none.
        eos_ids: ids that end a generation.
        vocab_size: number of tokens; ids are in [0, vocab_size).
    """

    def __init__(self, vocabulary: Vocabulary):
        """Builds the tokenizer.

        Warns of an unknown split rule and then splits text as GPT-2 does.
        """
        self._vocabulary = vocabulary
        self._tokens = tokens = vocabulary.tokens
        self.vocab_size = len(tokens)
        self.bos_id = vocabulary.bos_id
        rule = _ALIASES.get(vocabulary.split, vocabulary.split)
        implied = rule in _WHOLE_PIECES and self.bos_id is not None
        self._adds_bos = implied if vocabulary.add_bos is None else vocabulary.add_bos
        turn_ends = {tokens.index(end) for end in _TURN_ENDS if end in tokens}
        self.eos_ids = vocabulary.end_ids | turn_ends
        # A file may type its end-of-turn token as ordinary: it is a control even so. An
        # empty spelling is everywhere in a text: it stands for no token.
        control_ids = self.eos_ids | vocabulary.control_ids
        self._controls = {tokens[i]: i for i in control_ids if tokens[i]}
        units = {tokens[i] for i in vocabulary.unit_ids if tokens[i]}
        self._units = units | self._controls.keys()
        self._bpe = _build_bpe(vocabulary, rule, self._controls, self._units)
        longest_first = sorted(map(re.escape, self._controls), key=len, reverse=True)
        any_control = "|".join(longest_first) or "(?!)"
        self._split = re.compile(f"({any_control})").split
        # The lookahead finds every start, those inside another look-alike too.
        self._look_alike = re.compile(f"(?={any_control})(.)", re.DOTALL)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return bool(self._vocabulary.chat_template.strip())

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Encodes text; bytes the vocabulary lacks are dropped (SmolLM2 lacks 21).

        Args:
            text: the text; a control token's spelling in it is ordinary text.
            special: whether such spellings become the control tokens instead.

        Returns:
            Token ids, [length]; BOS first if the model asks for it and it is not there.

        Raises:
            UnicodeEncodeError: the text holds a lone surrogate (a ValueError).
        """
        ids = self._encode_special(text) if special else self._encode_plain(text)
        add_bos = self._adds_bos and ids[:1] != [self.bos_id]
        return [self.bos_id, *ids] if add_bos else ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Decodes token ids; bytes that are not valid UTF-8 become U+FFFD.

        Args:
            ids: token ids, [length]; one outside the vocabulary decodes to "".
            skip_special: whether control tokens decode to "" too.
        """
        return self.token_bytes(ids, skip_special=skip_special).decode(errors="replace")

    def token_bytes(self, ids: Iterable[int], *, skip_special: bool = True) -> bytes:
        """The bytes behind `decode`."""
        tokens = [self._tokens[i] for i in ids if 0 <= i < self.vocab_size]
        kept = [t for t in tokens if not (skip_special and t in self._controls)]
        return b"".join(map(self._bytes_of, kept))

    def has_control(self, text: str) -> bool:
        """Whether a control token is spelled in the text."""
        return len(self._split(text)) > 1

    def render(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """Renders a conversation; to encode it safely use `encode_chat` instead.

        Args:
            messages: turns, oldest first, each with a `role` and a `content`.
            add_generation_prompt: whether to open the assistant's next turn.

        Raises:
            ValueError: malformed messages, no chat template, or one that refuses them.
        """
        _check_messages(messages)
        if not self.has_chat_template:
            named = ", ".join(self._vocabulary.other_templates)
            others = f" of the name default, only {named}" if named else ""
            raise ValueError(
                f"the model has no chat template{others}; pass plain text instead"
            )
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(given)
        except (
            Exception
        ) as error:  # a template is the file's program: it raises anything
            raise ValueError(f"the model's chat template failed: {error}") from error

    def encode_chat(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Encodes a conversation; control tokens spelled in it are ordinary text.

        Each such spelling is broken by a marker character, which is taken out once the
        rendered text is split at the template's control tokens: the spelling gets the
        ids of ordinary text, and all else those of the rendered text encoded whole.
        Part of a spelling stays: templates build control tokens from the role. The
        usual roles stay too, even where one of them spells a control token.

        Returns:
            Token ids, [length], with no BOS added. For args and errors see `render`.
        """
        _check_messages(messages)
        used = set(self._vocabulary.chat_template)
        used.update(*(text for message in messages for text in message.values()))
        marker = next(c for c in map(chr, range(0x10FFFF, 0, -1)) if c not in used)
        guard = functools.partial(self._look_alike.sub, rf"\1{marker}")
        guarded = [
            {key: text if text in _ROLES else guard(text) for key, text in turn.items()}
            for turn in messages
        ]
        text = self.render(guarded, add_generation_prompt=add_generation_prompt)
        return self._encode_special(text, marker)

    def _encode_special(self, text: str, marker: str = "") -> list[int]:
        ids = []
        for index, piece in enumerate(self._split(text)):  # controls at odd indices
            plain = piece.replace(marker, "")
            ids += [self._controls[piece]] if index % 2 else self._encode_plain(plain)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        text.encode()  # the BPE calls a lone surrogate a TypeError and names nothing
        return self._bpe.encode(text).ids

    def _bytes_of(self, token: str) -> bytes:
        if token in self._units or not _BYTES.keys() >= set(token):
            return token.encode()
        return bytes(_BYTES[character] for character in token)

    @functools.cached_property
    def _template(self):
        ids = {"bos_token": self.bos_id, "eos_token": self._vocabulary.eos_id}
        texts = {name: self._tokens[i] for name, i in ids.items() if i is not None}
        template = self._vocabulary.chat_template
        return _chat_environment().from_string(template, texts)


class StreamDecoder:
    """Decodes tokens as they come, never half a character.

    The pieces of `push` and the one of `flush` join to what `Tokenizer.decode` gives
    for all ids at once, control tokens skipped unless told otherwise.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text of new tokens, up to the last whole character."""
        new = self._tokenizer.token_bytes(ids, skip_special=self._skip_special)
        return self._utf8.decode(new)

    def flush(self) -> str:
        """What is left of an incomplete character: U+FFFD, or nothing."""
        return self._utf8.decode(b"", final=True)


def _build_bpe(
    vocabulary: Vocabulary, rule: str | None, controls: dict, units: set
) -> BpeTokenizer:
    """Builds the BPE of ordinary text, which cannot make a control token."""
    vocab = {t: i for i, t in enumerate(vocabulary.tokens) if t not in controls}
    merges = [pair for pair in vocabulary.merges if "".join(pair) not in controls]
    bpe = BpeTokenizer(models.BPE(vocab, merges, ignore_merges=rule in _WHOLE_PIECES))
    bpe.pre_tokenizer = _pre_tokenizer(rule)
    if rule == "qwen2":
        bpe.normalizer = normalizers.NFC()
    ordinary = [token for token in units if token not in controls]
    bpe.add_tokens([AddedToken(token, normalized=False) for token in ordinary])
    return bpe


def _pre_tokenizer(name: str | None) -> pre_tokenizers.Sequence:
    if name not in _PRE_TOKENIZERS:
        known = ", ".join((*_PRE_TOKENIZERS, *_ALIASES))
        warning = f"split rule (tokenizer.ggml.pre) {name!r} is none of {known}; using "
        warnings.warn(f"{warning}GPT-2's rule", stacklevel=4)  # at Tokenizer's caller
    patterns = map(Regex, _PRE_TOKENIZERS.get(name, (_GPT2,)))
    steps = [pre_tokenizers.Split(p, behavior="isolated") for p in patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*steps, to_bytes])


def _check_messages(messages: object) -> None:
    fix = "pass a list such as [{'role': 'user', 'content': 'Hello'}]"
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages is {messages!r:.40}, not a non-empty list; {fix}")
    for index, message in enumerate(messages):
        found = type(message).__name__
        if isinstance(message, dict):
            found = {key: type(value).__name__ for key, value in message.items()}
        if found != {"role": "str", "content": "str"}:
            raise ValueError(f"message {index} is of {found}, two str needed; {fix}")


def _chat_environment():
    """Returns the sandboxed jinja2 environment that chat templates are written for."""
    import jinja2
    from jinja2 import ext, sandbox

    class Generation(ext.Extension):  # a mark for training: renders as its contents
        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, Generation]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["tools"] = environment.globals["documents"] = None
    return environment
