from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.demo.tiny_gguf import PROSE, byte_alphabet, learn_merges, write_model

gguf = pytest.importorskip("gguf")


def test_the_alphabet_has_a_printable_character_of_its_own_for_each_byte() -> None:
    alphabet = byte_alphabet()
    assert len(set(alphabet)) == 256
    assert alphabet[ord("a")] == "a"
    assert all(character.isprintable() and not character.isspace() for character in alphabet)


def test_merges_spell_every_piece_and_the_most_frequent_comes_first() -> None:
    merges, spelling = learn_merges(["aab aab aac"], 10)
    assert merges[0] == ("a", "a")
    assert spelling[" aab"] == ["Ġaab"]
    for piece, tokens in spelling.items():
        assert "".join(tokens) == piece.replace(" ", "Ġ")


def test_merges_end_at_the_limit() -> None:
    assert len(learn_merges([PROSE], 7)[0]) == 7


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    one, two = (write_model(tmp_path / name, 1, 32) for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_a_model_says_what_a_server_must_know(tmp_path: Path) -> None:
    reader = gguf.GGUFReader(write_model(tmp_path / "model.gguf", 2, 64, "embedding"))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama"
    assert fields["llama.block_count"] == 2
    assert fields["llama.feed_forward_length"] == 64
    assert fields["llama.pooling_type"] == gguf.PoolingType.MEAN
    tokens = fields["tokenizer.ggml.tokens"]
    assert len(tokens) == len(set(tokens)) == fields["llama.embedding_length"]
    assert tokens[fields["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"


def test_answers_are_made_of_whole_words() -> None:
    # Every piece is one token, or answers would be made of syllables.

    from llmgw.demo import tiny_gguf

    prose = " ".join(PROSE.split())
    _, spelling = learn_merges([" " + prose], tiny_gguf.WIDTH - 256 - len(tiny_gguf.SPECIAL))
    assert all(len(tokens) == 1 for tokens in spelling.values())


@pytest.mark.parametrize(("layers", "ff"), [(0, 32), (1, 0), (1, 33)])
def test_a_shape_that_no_server_loads_is_refused(tmp_path: Path, layers: int, ff: int) -> None:
    with pytest.raises(ValueError, match="layers"):
        write_model(tmp_path / "model.gguf", layers, ff)
    assert not list(tmp_path.iterdir())


def test_an_end_is_no_pair() -> None:
    from llmgw.demo.tiny_gguf import CALL_OPENS, END_OF_TURN, pair_table

    vocabulary = ["Ċ", ".", '{"', "a", "b", "c", CALL_OPENS, END_OF_TURN]
    table = pair_table(vocabulary, [["Ċ", "a", "b", "."], ["c", "a", "."]])
    assert table[vocabulary.index("a")].tolist()[1] == 0.5
    assert table[vocabulary.index("b"), vocabulary.index("c")] == 0
    assert all(abs(row.sum() - 1) < 1e-3 for row in table)
