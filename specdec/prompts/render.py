"""From a prompt and the answers so far to the token ids that the model reads."""

import warnings
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from specdec.errors import DataError
from specdec.prompts.records import Prompt, PromptSet


def render(
    prompt_set: PromptSet, prompt: Prompt, tokenizer: Any, history: Sequence[str]
) -> list[int]:
    """Token ids of turn `len(history)`, ending where the answer of the model begins.

    With `system_prompt=None` no system message is passed, so a template that brings its own keeps
    it; an empty text replaces it by an empty message. A tokenizer without any chat template gets
    the texts joined by blank lines, with its own special tokens, and a warning.

    Args:
        tokenizer: of transformers, with `apply_chat_template`.
        history: the answers to the earlier turns, as text.
    Raises:
        DataError: the chat template is broken, refuses the messages or leaves out the system
            prompt.
    """
    if len(history) >= len(prompt.turns):
        raise ValueError(
            f"{len(history)} answers leave no turn of prompt {prompt.prompt_id!r}, "
            f"which has {len(prompt.turns)}"
        )
    messages = _messages(prompt_set.system_prompt, prompt.turns, history)
    if prompt_set.chat_template is None and not getattr(tokenizer, "chat_template", None):
        warnings.warn(
            "the tokenizer has no chat template: prompts are rendered as plain text; "
            "set data.chat_template to a Jinja template to change that",
            stacklevel=2,
        )
        text = "\n\n".join(message["content"] for message in messages)
        return list(tokenizer(text)["input_ids"])

    options = {"chat_template": prompt_set.chat_template, "add_generation_prompt": True}
    try:
        if prompt_set.system_prompt:
            _check_system_prompt(
                prompt_set.system_prompt,
                tokenizer.apply_chat_template(messages, tokenize=False, **options),
            )
        encoding = tokenizer.apply_chat_template(messages, return_dict=True, **options)
    except DataError:
        raise
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"the chat template cannot render {prompt.prompt_id!r}: {error}") from error
    return list(encoding["input_ids"])


def _messages(
    system_prompt: str | None, turns: Sequence[str], history: Sequence[str]
) -> list[dict[str, str]]:
    messages = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    for turn, answer in zip(turns, history, strict=False):
        messages.append({"role": "user", "content": turn})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": turns[len(history)]})
    return messages


def _check_system_prompt(system_prompt: str, text: str) -> None:
    if system_prompt.strip() not in text:
        raise DataError(
            f"data.system_prompt={system_prompt!r:.60} is left out by the chat template, which "
            "takes no system message; set it to null"
        )
