"""The chat template of a tokenizer: makes the prompts of lm_eval's `hf` model, or raises a one-line error."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from shardplan.errors import ConfigError, one_line

SYSTEM = "system"
logger = logging.getLogger(__name__)


class ChatTemplate:
    """Writes the messages of a chat as one prompt."""

    def __init__(self, tokenizer: Any, name: str, variables: Mapping[str, Any]):
        """Use the template of a tokenizer.

        Args:
            name: name of the tokenizer, for messages.
            variables: further variables of the template, such as `enable_thinking`.
        """
        self._tokenizer, self._name, self._variables = tokenizer, name, variables
        self.refused_system: str | None = None
        """The template's message about the first system message that it refused; None if it refused none."""

    def apply(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """Return the prompt of a chat; system messages are left out if the template refuses them, as in `hf`.

        Raises:
            ConfigError: there is no template, or the template refuses the messages.
        """
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"{self._name} has no chat template; leave --apply_chat_template out, or save one there as "
                "chat_template.jinja"
            )
        try:
            return self._render(messages, add_generation_prompt)
        except TemplateError as error:
            others = [message for message in messages if message["role"] != SYSTEM]
            if len(others) == len(messages):
                raise self._refusal(messages, error) from error
            refusal = one_line(error)
        except Exception as error:  # a template is a program: anything may be wrong with it
            raise self._refusal(messages, error) from error
        try:
            prompt = self._render(others, add_generation_prompt)
        except Exception as error:
            raise self._refusal(others, error) from error
        if self.refused_system is None:
            self.refused_system = refusal
            logger.warning(
                "the chat template of %s refuses system messages (%s): prompts have none, as in hf", self._name, refusal
            )
        return prompt

    def _render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self._variables,
            )
        )

    def _refusal(self, messages: Sequence[Mapping[str, str]], error: Exception) -> ConfigError:
        roles = ", ".join(message["role"] for message in messages)
        return ConfigError(
            f"the chat template of {self._name} refuses messages with the roles {roles}: {one_line(error)}; set "
            "--fewshot_as_multiturn to the other value, or leave --apply_chat_template out"
        )
