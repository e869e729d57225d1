"""A real server for tests: uvicorn on a free port, in front of the real engine loop in a thread.

Only the model is not real: a `ScriptedExecutor` says what `say` told it to, and otherwise follows
its formula.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn
import zmq

from tests.scripted_executor import ScriptedExecutor
from tests.serve.toy_model import TEMPLATE, load_toy, toy_tokenizer
from trnc import presets
from trnc.checkpoint.generation import GenerationDefaults
from trnc.core import ExecutorInfo
from trnc.engine.executor import Executor
from trnc.engine.messages import Stats
from trnc.engine.process import EngineOptions, serve_engine
from trnc.serve.access import Admission
from trnc.serve.app import create_app
from trnc.serve.engine_client import EngineClient, bind_socket
from trnc.serve.launch import uvicorn_config
from trnc.serve.listening import ServeOptions, listen, raise_file_limit, tls_context
from trnc.serve.markup import Markup
from trnc.serve.model import ServedModel

MODEL = "toy/model"
ALIAS = "toy"
FEATURES = tuple(presets.FEATURES)


@dataclass(kw_only=True)
class Setup:
    """What a test may choose about its server."""

    model: str = MODEL
    max_rows: int = 4
    max_context: int = 512
    num_pages: int = 400
    max_waiting: int | None = None
    gate: threading.Semaphore | None = None
    die_at: tuple[int, ...] = ()
    fail_at: tuple[int, ...] = ()
    mtp_depths: tuple[int, ...] = ()  # always speculates; two guesses of three are right
    features: tuple[str, ...] = FEATURES
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    options: ServeOptions = field(default_factory=lambda: ServeOptions(max_body_bytes=2**20))
    send_buffer: int | None = None
    start_engine: bool = True
    chat_template: str | None = TEMPLATE
    bos: bool = False  # whether the tokenizer starts every text with a token
    real_executor: Executor | None = None  # instead of the scripted one
    grammars: bool = False
    markup: Markup = field(default_factory=Markup)


class Server:
    """A running server, and what a test does with it."""

    def __init__(self, setup: Setup) -> None:
        self.tokenizer, self.template = toy_tokenizer(setup.chat_template, bos=setup.bos)
        self.executor = ScriptedExecutor(
            info=ExecutorInfo(
                max_rows=setup.max_rows,
                max_prefill_tokens=64,
                max_context=setup.max_context,
                page_size=16,
                num_pages=setup.num_pages,
                vocab_size=self.tokenizer.vocab_size,
                eos_token_ids=self.tokenizer.eos_token_ids,
                mtp_depths=setup.mtp_depths,
                mtp_always=bool(setup.mtp_depths),
            ),
            script={},
            right=lambda position: position % 3 > 0,
            gate=setup.gate,
            die_at=setup.die_at,
            fail_at=setup.fail_at,
        )
        self._setup = setup
        self._client: httpx.Client | None = None
        self.port = 0
        self.engine: EngineClient
        self.admission: Admission
        self.loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def http(self) -> Iterator[httpx.Client]:
        """One client for all tests of a server: making one takes longer than most requests."""
        if self._client is None:
            self._client = httpx.Client(base_url=self.url, timeout=60)
        yield self._client

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def async_openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60
        )

    def prompt_ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=True)

    def anthropic(self) -> Any:
        import anthropic

        return anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0, timeout=60)

    def async_anthropic(self) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(base_url=self.url, api_key="none", max_retries=0)

    def chat_ids(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        assert self.template is not None
        text = self.template.render(messages, **{"add_generation_prompt": True, **options})
        return self.tokenizer.encode(text, add_special_tokens=False)

    def say(
        self, prompt: str | list[dict[str, Any]], reply: str | list[int], **options: Any
    ) -> None:
        """Script the reply to a text or to a conversation; eos follows it."""
        if isinstance(prompt, str):
            ids = self.prompt_ids(prompt)
        else:
            ids = self.chat_ids(prompt, **options)
        if isinstance(reply, str):
            reply = self.tokenizer.encode(reply, add_special_tokens=False)
        script = self.executor.script
        assert isinstance(script, dict)
        script[tuple(ids)] = reply

    def stats(self) -> Stats:
        return asyncio.run_coroutine_threadsafe(self.engine.stats(), self.loop).result(30)

    def wait_for(self, condition: Callable[[Stats], bool]) -> Stats:
        """Return the first Stats that meet a condition; the test's timeout is the limit."""
        while not condition(stats := self.stats()):
            pass
        return stats

    def check_idle(self, **headers: str) -> None:
        """Rows, pages and places are free once the engine has seen that its clients are gone."""
        while self.admission.open or self.engine.in_flight:
            pass
        self.wait_for(lambda stats: stats.running + stats.waiting == 0)
        with self.http() as http:
            [load] = http.get("/get_load", headers=headers).json()
        assert load == {"num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0, "dp_rank": 0}

    def run(self, started: threading.Event) -> None:
        asyncio.run(self._run(started))

    async def _run(self, started: threading.Event) -> None:
        raise_file_limit()
        self.loop = asyncio.get_running_loop()
        with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
            endpoint = f"ipc://{Path(folder) / 'e'}"
            self.engine = EngineClient(socket=bind_socket(context, endpoint))
            running = asyncio.ensure_future(self.engine.run())
            thread = threading.Thread(target=self._run_engine, args=(endpoint,))
            if self._setup.start_engine:
                thread.start()
                await self.engine.wait_ready()
            await self._run_http(started)
            self.engine.shutdown()
            if self._setup.gate is not None:
                self._setup.gate.release(10_000)
            if self._setup.start_engine:
                await asyncio.to_thread(thread.join)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _run_http(self, started: threading.Event) -> None:
        admission = self.admission = Admission(limit=self._setup.options.max_concurrent_requests)
        app = create_app(
            engine=self.engine,
            model=ServedModel(
                names=(self._setup.model, ALIAS),
                tokenizer=self.tokenizer,
                template=self.template,
                defaults=self._setup.defaults,
                markup=self._setup.markup,
            ),
            options=self._setup.options,
            admission=admission,
        )
        options = replace(self._setup.options, port=0)
        self._uvicorn = _Uvicorn(uvicorn_config(app, tls_context(options)))
        with listen(options) as listener:
            if self._setup.send_buffer is not None:  # which connections inherit
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._setup.send_buffer)
            self.port = listener.getsockname()[1]
            started.set()
            await self._uvicorn.serve(sockets=[listener])

    def _run_engine(self, endpoint: str) -> None:
        def factory(
            report: Callable[[str], None],
        ) -> tuple[Executor, dict[str, float], tuple[str, ...]]:
            report("building the executor")
            executor = self._setup.real_executor or self.executor
            return executor, {"everything": 0.0}, self._setup.features

        grammars = load_toy if self._setup.grammars else None
        options = EngineOptions(max_waiting=self._setup.max_waiting, grammars=grammars)
        serve_engine(factory, endpoint, options)

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
        self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def running(setup: Setup | None = None) -> Iterator[Server]:
    """Run a server for the length of a `with`."""
    server = Server(setup or Setup())
    started = threading.Event()
    thread = threading.Thread(target=server.run, args=(started,))
    thread.start()
    try:
        assert started.wait(30), "the server did not start"
        yield server
    finally:
        server.stop()
        thread.join()
