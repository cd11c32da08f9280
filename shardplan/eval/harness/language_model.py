"""The class that lm_eval registers as the model `shardplan`."""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from lm_eval.api.model import CachingLM, TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from shardplan.checkpoint.session import Session, prepare
from shardplan.errors import ConfigError, one_line
from shardplan.eval.harness.chat import ChatTemplate
from shardplan.eval.harness.encoding import Remarks, RequestEncoder
from shardplan.eval.harness.hf_arguments import read_text_arguments
from shardplan.eval.harness.requests import PackedRequests, Request, pack_requests
from shardplan.eval.harness.scorer import RequestScorer, check_equal
from shardplan.eval.harness.settings import read_settings
from shardplan.eval.harness.tasks import GENERATION_REFUSED
from shardplan.eval.harness.tokenizer import load_tokenizer
from shardplan.hardware import parse_slice
from shardplan.plan.workload.workload import AUTO_BATCH
from shardplan.report.plan.summary import speed_text
from shardplan.runtime.devices import is_first_process, start_devices
from shardplan.runtime.progress import print_note
from shardplan.search.fastest_batch import batches
from shardplan.storage import open_folder

DEFAULT_BATCH_SIZES = (None, 1, "1", "auto")
"""Values of `batch_size` that leave the choice to the planner, among them lm_eval's default."""
logger = logging.getLogger(__name__)


@register_model("shardplan")
class ShardplanLM(TemplateLM):
    """The lm_eval model `shardplan`: a checkpoint that is planned, streamed and scored on all devices of a slice.

    See docs/howto/lm-eval.md. Requests get the same results as from lm_eval's `hf` model with the same `max_length` and
    dtypes. When the first requests arrive, the weights are loaded and the only program is compiled.
    """

    def __init__(
        self,
        config: str | None = None,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **overrides: Any,
    ):
        """Read the configuration and the tokenizer, and start the devices.

        Args:
            config: YAML file of a configuration, as for `shardplan eval`.
            max_length: most tokens that the model is given to predict the next one; default: `workload.position` - 1.
                If `workload.position` is not set, `max_length` decides it.
            add_bos_token: as in the `hf` model: whether texts begin with the BOS token; default: as the tokenizer does.
            prefix_token_id: as in the `hf` model: token before a text without context; default: BOS, or else EOS.
            batch_size, max_batch_size, device: not used; `workload.batch` and `hardware.slice` decide.
            overrides: keys of the configuration, such as `model.ref` or `mesh.model`; and arguments of the `hf` model
                (`shardplan.eval.harness.hf_arguments`), such as `pretrained` and `dtype`.

        Raises:
            ConfigError: the configuration cannot be used.
            CheckpointError: the checkpoint has no tokenizer.
        """
        super().__init__()
        self._settings, self._given = read_settings(config, max_length, overrides)
        text = read_text_arguments(overrides)
        self._max_length = max_length or self._settings.workload.position - 1
        if not self._settings.model.ref:
            raise ConfigError(
                "model.ref is not set; name a checkpoint (or pretrained), because its tokens and weights are needed"
            )
        if batch_size not in DEFAULT_BATCH_SIZES:
            logger.warning("batch_size %s is not used; set workload.batch among the model_args", batch_size)
        hardware = parse_slice(self._settings.hardware.slice)
        start_devices(hardware.name, hardware.devices, hardware.is_cpu, self._settings.facts)
        if jax.process_count() > 1:
            # lm_eval has a cache per LOCAL_RANK, and reports where it is 0; its own ranks would share out the requests
            os.environ["LOCAL_RANK"] = str(jax.process_index())
        self._add_bos_token, self._prefix_token_id = add_bos_token, prefix_token_id
        settings = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
        self.tokenizer = load_tokenizer(open_folder(text.tokenizer or self._settings.model.ref), **settings)
        self._chat_template = ChatTemplate(self.tokenizer, self.tokenizer.name_or_path, text.chat_template_args)
        prefix = self.tokenizer.bos_token_id if prefix_token_id is None else prefix_token_id
        self._prefix = self.tokenizer.eos_token_id if prefix is None else prefix
        self._prefix_text = None if self._prefix is None else self.tokenizer.decode(self._prefix)
        self._remarks = Remarks()
        self.left_out: dict[str, str] = {}
        """Task of the last evaluation that this model cannot run -> the feature that it would need."""
        self._scorer: RequestScorer | None = None
        self._session: Session | None = None

    @property
    def max_length(self) -> int:
        """Maximum number of tokens that the model gets to predict the next one."""
        return self._max_length

    @property
    def eot_token_id(self) -> int:
        """The EOS token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes a text without context.

        Raises:
            ConfigError: the tokenizer has neither BOS nor EOS, and none was given.
        """
        if self._prefix is None:
            raise ConfigError(
                "the tokenizer has neither a BOS nor an EOS token, which a text without context needs; set "
                "prefix_token_id among the model_args"
            )
        return int(self._prefix)

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for lm_eval's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template that `apply_chat_template` uses, for lm_eval's results.

        Raises:
            ConfigError: there is no template of that name.
        """
        try:
            template: str | None = super().chat_template(chat_template)
        except ValueError as error:
            raise ConfigError(f"apply_chat_template: {one_line(error)}") from error
        return template

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the prompt of a chat, as the template of the tokenizer writes it.

        If the template refuses system messages, they are left out, as in the `hf` model.

        Raises:
            ConfigError: there is no template, or the template refuses the chat.
        """
        return self._chat_template.apply(chat_history, add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text, with the special tokens that the `hf` model adds."""
        settings = {}
        if add_special_tokens is not None:
            settings = {"add_special_tokens": add_special_tokens}
        elif self._prefix_text is not None and string.startswith(self._prefix_text):
            settings = {"add_special_tokens": False}
        elif self._add_bos_token is not None:
            settings = {"add_special_tokens": self._add_bos_token}
        return list(self.tokenizer.encode(string, **settings))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-probability in nats of each continuation, and whether greedy decoding produces it.

        Raises:
            ConfigError: a continuation without tokens, or of more than `max_length`; the tokenizer has no token to
                precede a text without context.
        """
        encoder = RequestEncoder(self.tok_encode, self._encode_pair, lambda: self.prefix_token_id, self.max_length)
        is_quiet = disable_tqdm or not is_first_process()
        encoded, remarks = encoder.encode_all(tqdm(requests, "Tokenizing inputs", disable=is_quiet))
        results = self._loglikelihood([each.args for each in requests], encoded)
        self._remarks.update(remarks)
        if is_first_process():
            for line in remarks.lines(len(requests), self.max_length):
                print_note(line)
        return results

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Score tokenized requests: (texts, context, continuation)."""
        return self._loglikelihood([each[0] for each in requests], [Request(*each[1:]) for each in requests])

    def _loglikelihood(self, texts: Sequence[tuple[Any, ...]], requests: Sequence[Request]) -> list[tuple[float, bool]]:
        """Score requests, and store the results in lm_eval's cache under their texts."""

        def keep(numbers: np.ndarray, log_probs: np.ndarray, is_greedy: np.ndarray) -> None:
            for number, *result in zip(numbers.tolist(), log_probs.tolist(), is_greedy.tolist(), strict=True):
                self.cache_hook.add_partial("loglikelihood", texts[number], tuple(result))

        # several processes that are killed would keep different results, and have different requests from then on
        log_probs, is_greedy = self._score(requests, keep if jax.process_count() == 1 else None)
        return list(zip(log_probs.tolist(), is_greedy.tolist(), strict=True))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability in nats of each whole text, in windows that predict every token once."""
        windows, owners = [], []
        for number, (text,) in enumerate(request.args for request in requests):
            for pair in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append(Request(*make_disjoint_window(pair)))
                owners.append(number)
        log_probs, _ = self._score(windows)
        totals: list[float] = np.bincount(owners, log_probs, len(requests)).tolist()
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Refuse to generate text.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(GENERATION_REFUSED)

    def get_model_info(self) -> dict[str, Any]:
        """Return the entries that lm_eval writes beside the results: plan, programs, omitted tasks, request remarks."""
        info: dict[str, Any] = {"tasks_left_out": dict(self.left_out), **self._remarks.to_json()}
        if self._scorer is None or self._session is None:
            return info
        plan = self._session.plan
        return {
            **info,
            "model_ref": self._session.folder.ref,
            "model_adapter": None if self._session.adapter is None else self._session.adapter.ref,
            "max_length": self.max_length,
            "plan": replace(plan, details=None).to_json(),
            "programs_compiled": self._scorer.statistics.programs,
        }

    def _score(self, requests: Sequence[Request], on_scored: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probability of every request, and whether greedy decoding produces it."""
        if not requests:
            return np.empty(0), np.empty(0, bool)
        packed = pack_requests(requests, self.max_length, self._settings.workload.position)
        check_equal(packed)
        if self._scorer is None:
            self._session = self._prepare(packed)
            self._scorer = RequestScorer(self._session)
        scorer = self._scorer
        before = scorer.statistics.steps
        results = scorer.score(packed, on_scored)
        if is_first_process():
            statistics = scorer.statistics
            print_note(
                f"{len(requests)} requests in {len(packed.tokens)} windows, {packed.rows} rows of {packed.position} "
                f"tokens ({packed.filled:.0%} filled), {statistics.steps - before} steps; forward programs compiled so "
                f"far: {statistics.programs} (in {statistics.compile_seconds:.1f} s)"
            )
        return results

    def _prepare(self, packed: PackedRequests) -> Session:
        """Plan for the requests, with the fastest batch, or with a smaller one that holds all of them."""
        settings = self._settings
        session = prepare(settings, self._given)
        if settings.workload.batch == AUTO_BATCH:
            devices = parse_slice(settings.hardware.slice).devices
            enough = max(packed.rows, devices)
            batch = next((b for b in batches(devices, packed.position) if b >= enough), enough)
            if batch < session.plan.workload.batch:
                session = prepare(replace(settings, workload=replace(settings.workload, batch=batch)), None)
        if is_first_process():
            plan = session.plan
            mesh = ", ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
            print_note(f"plan: {mesh}; batch {plan.workload.batch} x {plan.workload.position}; {speed_text(plan)}")
        return session


def own_model(lm: Any) -> ShardplanLM | None:
    """Return the `ShardplanLM` that lm_eval evaluates, without the cache that wraps it; None for another model."""
    model = lm.lm if isinstance(lm, CachingLM) else lm
    return model if isinstance(model, ShardplanLM) else None
