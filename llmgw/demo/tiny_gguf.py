"""Write a tiny model file that the real llama.cpp server loads and answers from.

The model is a bigram model in the form of a llama: it needs no training, its
answers are readable English with a natural end, and it is made in about a second.

How a table of word pairs becomes a transformer:

* the vocabulary has as many tokens as the model has dimensions, and the embedding is
  the identity: after the last norm the state of token ``i`` is ``sqrt(d)`` at ``i``, 0 elsewhere;
* the blocks hold zeros. They leave the state as it is and cost the same time as any
  others would; ``layers`` and ``ff`` say how much;
* the output matrix holds ``log P(next | current) / sqrt(d)``, so the logits that
  come out are the logarithms of the pair table.

The same bytes come out for the same arguments (with the same numpy and gguf).

Known weaknesses: (1) each word depends on the word before it and on nothing else, so a
prompt does not change what is said; (2) ``rerank`` scores tell documents apart and mean nothing.

:source: the GGUF key names of llama.cpp's ``gguf`` package; ChatML for the template.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Kind = Literal["chat", "embedding", "rerank"]

REVISION = 1
"""Raised when the same arguments give other bytes than before, so that kept files are made anew."""

WIDTH = 896
"""Dimensions, and tokens in the vocabulary."""

HEAD = 64
HEADS = 2
SENTENCES = 4.0
"""Mean sentences of an answer."""

END_OF_TEXT, TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Not "<|call|>": llama.cpp knows that name as an end of turn.
ACT, CALL_OPENS, CALL_ENDS = "<|act|>", "<tool_call>", "\n</tool_call>"
SPECIAL = (END_OF_TEXT, TURN, END_OF_TURN, ACT, CALL_OPENS, CALL_ENDS)

PROSE = """
The gateway knows each server by its own clock. It asks how long the first word took and remembers
the answer. A fast server gets more work and a slow server gets less work. When two servers are
equal, the one with fewer open streams gets the next request. No request waits inside a server that
is full. If every server is full, the gateway says so at once and names the time to come back. A
client that hears this can wait a little and try again. Most clients do it without being told.

The first word of an answer is the one that people wait for. Before it comes, the server reads the
whole prompt. A long prompt takes a long time to read. A prompt that was read before is still warm,
and only the new part has to be read again. So it is good to send a conversation back to the server
that heard it last. That is not always the fastest server, but it is often the first to answer.

Servers fail in many ways. Some stop and some hang, and some say yes and then say nothing. The gateway
counts the failures and stops sending requests to a server that failed five times. After a short
rest it sends one request and looks at what comes back. If the answer is good, the server gets a
little work, then more work, then all of its share. If the answer is bad, the rest gets longer.

When a client goes away, nobody will read the rest of the answer. The gateway closes the stream and
the server is free for the next client. When the gateway has to stop, it takes no new requests and
finishes the old ones first. Nobody loses a word. The operator sees each step on one page.

A harbour works in the same way. Ships come in at all hours and each of them needs a berth. The
harbour master knows which berth is free and which crane is quick. A small boat does not wait behind
a large ship. When a storm comes, the lamps stay lit and the gates stay open. In the evening the
fishermen mend their nets and talk about the weather. The old lighthouse turns and counts the boats.
The cook makes soup for everybody and keeps a bowl warm for the last one. In the morning the market
opens, and the smell of bread goes up the hill. A child counts the gulls on the wall and is never
finished. The baker says that good bread needs time, flour, water and salt. The tailor measures twice
and cuts once. The clock on the tower is five minutes late and everybody knows it.

This answer was made by a very small model. It has read one page of text and knows nothing else. It
does not understand the question, but it is quick and it is always polite. Ask a larger model if you
want to know more. Thank you for trying it. I hope that this helps. Please ask me again.
"""
TOOL_CALLS = [
    {"name": "weather", "arguments": {"city": "Oslo"}},
    {"name": "weather", "arguments": {"city": "Lima", "unit": "celsius"}},
    {"name": "search", "arguments": {"query": "harbour"}},
    {"name": "search", "arguments": {"query": {"text": "lighthouse"}}},
]
TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\n\\nTo call one, answer with\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function or call %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else (call.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if tools and messages[-1].role != 'tool' %}{{- '<|act|>' }}{% endif %}
{%- endif %}
"""

# How "gpt-2" cuts text before merging, for ASCII.
_PIECES = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    :source: GPT-2's ``encoder.py``, ``bytes_to_unicode``.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    strange = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(strange)) for byte in range(256)]


def learn_merges(texts: Sequence[str], limit: int) -> tuple[list[tuple[str, str]], dict[str, list[str]]]:
    """Byte-pair encoding learnt from ``texts``.

    :param limit: merges at most; fewer when every piece has become one token.
    :return: the merges, most frequent first, and the tokens of each piece of the texts under them.
    """
    alphabet = byte_alphabet()
    counts = Counter(piece for text in texts for piece in _PIECES.findall(text))
    spelling = {piece: [alphabet[byte] for byte in piece.encode()] for piece in counts}
    pairs: Counter[tuple[str, str]] = Counter()
    users: defaultdict[tuple[str, str], set[str]] = defaultdict(set)

    def account(piece: str, sign: int) -> None:
        symbols = spelling[piece]
        for pair in pairwise(symbols):
            pairs[pair] += sign * counts[piece]
            users[pair].add(piece)

    for piece in counts:
        account(piece, 1)
    merges: list[tuple[str, str]] = []
    while len(merges) < limit:
        # The pair itself breaks ties, so that the order of sets never shows.
        best, seen = max(pairs.items(), key=lambda item: (item[1], item[0]), default=(("", ""), 0))
        if seen <= 0:
            break
        merges.append(best)
        for piece in users.pop(best):
            account(piece, -1)
            spelling[piece] = _merged(spelling[piece], best)
            account(piece, 1)
    return merges, spelling


def _merged(symbols: Sequence[str], pair: tuple[str, str]) -> list[str]:
    done: list[str] = []
    for symbol in symbols:
        if done and (done[-1], symbol) == pair:
            done[-1] += symbol
        else:
            done.append(symbol)
    return done


def pair_table(vocabulary: Sequence[str], texts: Sequence[Sequence[str]]) -> NDArray[np.float64]:
    """Probability of each token (column) after each token (row).

    :param texts: tokens of each text; an end is no pair.
    """
    import numpy as np

    index = {token: at for at, token in enumerate(vocabulary)}
    line_break = byte_alphabet()[0x0A]
    table = np.zeros((len(vocabulary), len(vocabulary)))
    for tokens in texts:
        for current, following in pairwise(tokens):
            table[index[current], index[following]] += 1
    # What no text shows goes on as the line break before an answer does: a sentence opens.
    table[table.sum(axis=1) == 0] = table[index[line_break]]
    table /= table.sum(axis=1, keepdims=True)
    table[index["."]] *= 1 - 1 / SENTENCES
    table[index["."], index[END_OF_TURN]] = 1 / SENTENCES
    # A tool call opens with the same line break as an answer. A grammar decides which it is;
    # without one this never shows, the usual samplers cut it off.
    table[index[CALL_OPENS]] = 0
    table[index[CALL_OPENS], index[line_break]] = 1
    table[index[line_break], index['{"']] = 1e-4
    return table


def write_model(
    path: Path | str, layers: int = 4, ff: int = 1024, kind: Kind = "chat", *, name: str = "llmgw-tiny"
) -> Path:
    """Write one model; an existing file is replaced in one step.

    :param layers: blocks, 1 or more; more is slower.
    :param ff: width of each feed-forward layer, a multiple of 32. 4 x 1024 is 23 MB.
    :param kind: ``embedding`` wants the server's ``--embedding``, ``rerank`` its ``--rerank``.
    :return: ``path``.
    :raise ImportError: the extra ``demo`` is not installed.
    """
    import gguf
    import numpy as np

    if layers < 1 or ff < 32 or ff % 32:
        raise ValueError(f"layers={layers}, ff={ff}: want layers >= 1 and ff a multiple of 32")
    path = Path(path)
    prose = " ".join(PROSE.split())
    sentences = ["\n" + sentence for sentence in re.split(r"(?<=\.) ", prose)]
    calls = [json.dumps(call) for call in TOOL_CALLS]
    texts = [" " + prose, *sentences, *calls]
    merges, spelling = learn_merges(texts, WIDTH - 256 - len(SPECIAL))
    tokens = [[token for piece in _PIECES.findall(text) for token in spelling[piece]] for text in texts]
    for call in tokens[-len(calls) :]:
        call[:] = [ACT, CALL_OPENS, *call, CALL_ENDS, END_OF_TURN]
    # Whatever a grammar has in mind after a word in quotation marks, one of these closes it.
    closings = ['":', '",', '"}}', '"']
    quoted = {a for call in tokens[-len(calls) :] for a, b in pairwise(call) if b in closings}
    tokens += [['"', word, closing] for word in sorted(quoted) for closing in closings]
    vocabulary = list(dict.fromkeys([*byte_alphabet(), *("".join(merge) for merge in merges)]))
    unused = [f"[unused{at}]" for at in range(WIDTH - len(vocabulary) - len(SPECIAL))]
    vocabulary += [*unused, *SPECIAL]
    types = {
        **dict.fromkeys(unused, gguf.TokenType.UNUSED),
        **dict.fromkeys(SPECIAL, gguf.TokenType.CONTROL),
        # Control tokens are not shown in answers; these two are.
        CALL_OPENS: gguf.TokenType.USER_DEFINED,
        CALL_ENDS: gguf.TokenType.USER_DEFINED,
    }
    table = pair_table(vocabulary, tokens)
    # A pair never seen keeps a chance of 1e-9: grammars may force it.
    logits = np.log(np.maximum(table, 1e-9))

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    # A rank classifier over a llama is refused by llama.cpp; over a qwen3 it is taken.
    rerank = kind == "rerank"
    writer = gguf.GGUFWriter(unfinished, "qwen3" if rerank else "llama")
    try:
        writer.add_name(name)
        writer.add_license("MIT")
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
        writer.add_context_length(32768)
        writer.add_vocab_size(WIDTH)
        writer.add_embedding_length(WIDTH)
        writer.add_block_count(layers)
        writer.add_feed_forward_length(ff)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(HEADS)
        writer.add_key_length(HEAD)
        writer.add_value_length(HEAD)
        writer.add_rope_dimension_count(HEAD)
        writer.add_rope_freq_base(10000.0)
        writer.add_layer_norm_rms_eps(1e-5)
        if kind != "chat":
            writer.add_pooling_type(gguf.PoolingType.RANK if rerank else gguf.PoolingType.MEAN)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(vocabulary)
        writer.add_token_types([types.get(token, gguf.TokenType.NORMAL) for token in vocabulary])
        writer.add_token_merges([" ".join(merge) for merge in merges])
        writer.add_bos_token_id(vocabulary.index(END_OF_TEXT))
        writer.add_pad_token_id(vocabulary.index(END_OF_TEXT))
        writer.add_eos_token_id(vocabulary.index(END_OF_TURN))
        writer.add_eot_token_id(vocabulary.index(END_OF_TURN))
        writer.add_add_bos_token(False)
        if rerank:
            writer.add_sep_token_id(vocabulary.index(END_OF_TURN))
            writer.add_add_eos_token(True)
            writer.add_classifier_output_labels(["yes", "no"])
        writer.add_chat_template(TEMPLATE)
        for tensor, values in _tensors(logits, layers, ff, rerank):
            writer.add_tensor(tensor, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _tensors(
    logits: NDArray[np.float64], layers: int, ff: int, rerank: bool
) -> list[tuple[str, NDArray[np.generic]]]:
    import numpy as np

    dice = np.random.default_rng(7)

    def noise(*shape: int) -> NDArray[np.float16]:
        return (dice.standard_normal(shape, dtype=np.float32) / math.sqrt(WIDTH)).astype(np.float16)

    ones = np.ones(WIDTH, np.float32)
    wide = HEADS * HEAD
    tensors: list[tuple[str, NDArray[np.generic]]] = [
        ("token_embd.weight", np.eye(WIDTH, dtype=np.float16)),
        ("output_norm.weight", ones),
        ("output.weight", (logits.T / math.sqrt(WIDTH)).astype(np.float16)),
    ]
    if rerank:
        tensors.append(("cls.output.weight", noise(2, WIDTH)))
    into = np.zeros((wide, WIDTH), np.float16)
    out = np.zeros((WIDTH, wide), np.float16)
    up = np.zeros((ff, WIDTH), np.float16)
    down = np.zeros((WIDTH, ff), np.float16)
    for block in range(layers):
        at = f"blk.{block}"
        tensors += [
            (f"{at}.attn_norm.weight", ones),
            (f"{at}.attn_q.weight", into),
            (f"{at}.attn_k.weight", into),
            # Zero queries and keys attend evenly to the whole text, so with values that
            # are not zero the last token, the one that is scored, holds all of it.
            (f"{at}.attn_v.weight", noise(wide, WIDTH) if rerank else into),
            (f"{at}.attn_output.weight", noise(WIDTH, wide) if rerank else out),
            (f"{at}.ffn_norm.weight", ones),
            (f"{at}.ffn_gate.weight", up),
            (f"{at}.ffn_up.weight", up),
            (f"{at}.ffn_down.weight", down),
        ]
        if rerank:
            tensors += [
                (f"{at}.attn_q_norm.weight", ones[:HEAD]),
                (f"{at}.attn_k_norm.weight", ones[:HEAD]),
            ]
    return tensors


def main() -> None:
    """``python -m llmgw.demo.tiny_gguf PATH [--layers N] [--ff N] [--kind KIND]``"""
    parser = argparse.ArgumentParser(
        prog="python -m llmgw.demo.tiny_gguf", description=__doc__.split("\n")[0]
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ff", type=int, default=1024)
    parser.add_argument("--kind", choices=["chat", "embedding", "rerank"], default="chat")
    parser.add_argument("--name", default="llmgw-tiny")
    options = parser.parse_args()
    try:
        path = write_model(options.path, options.layers, options.ff, options.kind, name=options.name)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
