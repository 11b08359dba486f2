"""What a tokenizer is made of, whichever file it comes from."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """A byte-level BPE vocabulary with its chat template; ids are places in `tokens`.

    Attributes:
      tokens: spellings, in GPT-2's alphabet of bytes.
      merges: pairs of tokens, the first to be merged first.
      split: name of the rule that splits text before merging.
      control_ids: tokens that no text makes.
      unit_ids: tokens that are matched in any text before it is split.
      bos_id: the beginning of a sequence.
      eos_id: the end of a sequence; what a template calls `eos_token`.
      end_ids: ids that end an answer; tokens known as ends of a turn do so too.
      add_bos: whether encoded text begins with `bos_id`; None is what `split` implies.
      chat_template: a jinja template of conversations; blank where there is none.
      other_templates: names of templates that are there and not used.
    """

    tokens: list[str]
    merges: list[tuple[str, str]]
    split: str | None = None
    control_ids: frozenset[int] = frozenset()
    unit_ids: frozenset[int] = frozenset()
    bos_id: int | None = None
    eos_id: int | None = None
    end_ids: frozenset[int] = frozenset()
    add_bos: bool | None = None
    chat_template: str = ""
    other_templates: tuple[str, ...] = ()
