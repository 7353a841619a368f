"""A ``common.text.tokenizer.Tokenizer`` made of a ``tokenizer.json`` and a chat template alone.

For processes without transformers: it gives the same ids and texts as the tokenizer object it was taken from, as long
as that is a plain wrapper round the two (``common.text.tokenizer_document`` checks it). Thread-safe; tokenising
releases the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from common.text.chat_template import ChatTemplate


class LightTokenizer:
    """
    Args:
        tokenizer_json: the file's text.
        chat_template, tool_template: for chats without and with tools; None where the model has none.
        special_tokens: variables of the templates: ``bos_token`` and so on.
        special_ids: ids that ``skip_special_tokens`` leaves out.
        split_special_tokens: tokenise the names of special tokens like any text.

    Raises whatever the two libraries say of content that they cannot use.
    """

    def __init__(
        self,
        tokenizer_json: str,
        *,
        chat_template: str | None,
        tool_template: str | None,
        special_tokens: Mapping[str, str],
        special_ids: Sequence[int],
        split_special_tokens: bool = False,
    ) -> None:
        self._backend = Backend.from_str(tokenizer_json)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = split_special_tokens
        self._template = None if chat_template is None else ChatTemplate(chat_template)
        self._tool_template = self._template
        if tool_template is not None and tool_template != chat_template:
            self._tool_template = ChatTemplate(tool_template)
        self._special_tokens = dict(special_tokens)
        self._special_ids = tuple(special_ids)

    @property
    def all_special_ids(self) -> Sequence[int]:
        return self._special_ids

    def __len__(self) -> int:
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        # A batch of one: only batches release the interpreter's lock.
        encodings = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encodings[0].ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> Sequence[str | None]:
        return [self._backend.id_to_token(token_id) for token_id in token_ids]

    def convert_tokens_to_ids(self, tokens: list[str]) -> Sequence[int | None]:
        return [self._backend.token_to_id(token) for token in tokens]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **variables: Any,
    ) -> str | Sequence[int]:
        """Text, or its token ids with ``tokenize``. Raises what the template raises, ValueError without a template."""
        assert not return_dict, "only plain results are made here"
        template = self._template_for(tools)
        if "conversations" in variables:
            raise TypeError("conversations is no name for a template's argument: transformers uses it itself")
        text = template.render(
            conversation,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self._special_tokens, **variables},
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def get_chat_template(
        self, chat_template: str | None = None, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """The source of the template that a chat is rendered by. Raises ValueError without one."""
        return self._template_for(tools).source if chat_template is None else chat_template

    def _template_for(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        template = self._template if tools is None else self._tool_template
        if template is None:
            raise ValueError("Cannot use chat template functions because tokenizer.chat_template is not set")
        return template
