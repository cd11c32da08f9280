"""Runs Levanter's parser in another process, which imports Levanter while the caller works.

Levanter's programs import all of its trackers, data sets and models: several seconds and gigabytes that a lint needs
nowhere else, and whatever those packages do on import cannot disturb it.
"""

import atexit
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Self

import yaml

from shardplan.levanter_config.programs import LevanterProgram
from shardplan.lint.parser.problem import ParserVerdict

TIME_LIMIT_SECONDS = 600.0
"""Seconds after which the parser is stopped: many times its usual time, even on a busy machine."""
MAX_LINE = 300
"""Maximum characters that an error keeps of the output's last line."""


class ParserStopped(Exception):
    """Levanter's parser gave no verdict, for the reason in its text."""


class LevanterParser:
    """Levanter's parser in a background process, which starts at once and runs until this is closed."""

    def __init__(self) -> None:
        self._log = _LastLine()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shardplan.lint.parser"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # an import that looks for devices must not take those of this process
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        threading.Thread(target=self._log.follow, args=(self._process.stderr,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin
        with contextlib.suppress(OSError):  # a request that was not read is still in its buffer
            self._process.stdin.close()

    def parse(self, text: str, program: LevanterProgram, inside: Sequence[str] = ()) -> ParserVerdict:
        """Return the verdict of Levanter's parser on the text of a file.

        Args:
            inside: keys of the section that holds Levanter's configuration, from the top of the file down.

        Raises:
            ParserStopped: the process ended, or the limit of time was reached.
        """
        request = {
            "text": text, "inside": list(inside), "module": program.module, "config_class": program.config_class,
        }  # fmt: skip
        assert self._process.stdin
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            answer = self._answers.get(timeout=TIME_LIMIT_SECONDS)
        except BrokenPipeError:
            answer = None
        except queue.Empty:
            raise ParserStopped(f"it did not answer within {TIME_LIMIT_SECONDS:.0f} s") from None
        if answer is None:
            raise ParserStopped(self._log.text or "its process ended")
        return ParserVerdict.from_json(json.loads(answer))

    def parse_values(self, values: object, program: LevanterProgram) -> ParserVerdict:
        """Return the verdict of Levanter's parser on a file with these sections."""
        return self.parse(yaml.safe_dump(values), program)

    def _read(self, stdout: IO[str]) -> None:
        for line in stdout:
            self._answers.put(line)
        self._answers.put(None)


class _LastLine:
    """Keeps the last line that the parser's process wrote to stderr."""

    text = ""

    def follow(self, stderr: IO[str]) -> None:
        """Read lines until the process ends."""
        for line in stderr:
            self.text = line.strip()[:MAX_LINE] or self.text


_shared: list[LevanterParser] = []


def shared_parser() -> LevanterParser:
    """Return the parser that all callers of this process share, because starting one takes seconds."""
    if not _shared or _shared[0].has_ended:
        parser = LevanterParser()
        atexit.register(parser.close)
        _shared[:] = [parser]
    return _shared[0]
