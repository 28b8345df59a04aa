"""Texts of a table as tokens: one public length, a tokenizer that everybody has, natural clients, next tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modicum.config import read
from modicum.data import from_csv
from modicum.data.columns import Column
from modicum.data.tokens import Tokenizer, tokenizer_digest, tokenizer_in
from modicum.deploy.silo.terms import agreed_parts
from modicum.errors import UserError

LENGTH = 6
WORDS = ["[PAD]", "[UNK]", "the", "cat", "sat", "on", "a", "mat", "dog", "ran", "far", "away", "over", "hill"]
SHORT = "speaker,note,kind\nann,the cat sat,0\nbob,a dog ran,1\nann,the mat,0\nbob,a hill,1\n"
LONG = SHORT.replace("the cat sat", "the cat sat on a mat the dog ran far away over a hill")
FILE = """
[data]
csv = "notes.csv"
client_column = "speaker"
label_column = "kind"
classes = 2
[data.columns]
note = { text = 6, tokenizer = "words" }
[method]
name = "dp-sgd"
[run]
rounds = 1
"""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of whole words, in the files of save_pretrained."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("tokenizer") / "words"
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]"}))
    return folder


def notes(folder: Path, text: str, tokenizer: Path, **how: Any) -> Any:
    (folder / "notes.csv").write_text(text)
    columns = {"note": Column(text=LENGTH, tokenizer=str(tokenizer))}
    return from_csv(folder / "notes.csv", client="speaker", columns=columns, **{"label": "kind", **how})


def test_a_text_becomes_tokens_and_a_mask_of_natural_clients(words: Path, tmp_path: Path) -> None:
    data = notes(tmp_path, SHORT, words, classes=2)
    assert data.client_names == ("ann", "bob")
    assert data.train.x["input_ids"].tolist()[0] == [2, 3, 4, 0, 0, 0]
    assert data.train.x["attention_mask"].tolist()[0] == [True] * 3 + [False] * 3
    assert data.values == {"input_ids": len(WORDS)}
    assert not data.peeks  # nothing was taken from the records


def shapes(data: Any) -> Any:
    return data.train.shape


def test_no_shape_depends_on_a_record(words: Path, tmp_path: Path) -> None:
    assert shapes(notes(tmp_path, SHORT, words)) == shapes(notes(tmp_path, LONG, words))
    assert notes(tmp_path, LONG, words).train.x["attention_mask"][0].all()


def test_padding_to_the_longest_text_is_found(
    words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: what most libraries do by default tells everybody how long the longest record is."""
    encode = Tokenizer.encode

    def to_the_longest(self: Tokenizer, texts: Sequence[str], length: int) -> Any:
        found = encode(self, texts, length)
        most = int(found["attention_mask"].sum(1).max())
        return {name: leaf[:, :most] for name, leaf in found.items()}

    monkeypatch.setattr(Tokenizer, "encode", to_the_longest)
    assert shapes(notes(tmp_path, SHORT, words)) != shapes(notes(tmp_path, LONG, words))


def test_a_text_does_not_change_with_those_beside_it(words: Path) -> None:
    tokenizer = tokenizer_in(str(words))
    alone, beside = (tokenizer.encode(texts, LENGTH) for texts in (["the cat"], ["the cat", LONG, ""]))
    assert all(np.array_equal(alone[name][0], beside[name][0]) for name in alone)
    assert not beside["attention_mask"][2].any()


def test_without_labels_the_next_token_is_learned(words: Path, tmp_path: Path) -> None:
    data = notes(tmp_path, SHORT.replace(",kind", "").replace(",0\n", "\n").replace(",1\n", "\n"), words, label=())
    assert data.train.y.tolist()[0] == [2, 3, 4, -100, -100, -100]
    assert data.classes == 0


def test_other_columns_stand_beside_it(words: Path, tmp_path: Path) -> None:
    text = "speaker,note,age,kind\nann,the cat,3,0\nbob,a dog,4,1\n"
    data = notes(tmp_path, text, words)
    assert data.train.x["numbers"].tolist() == [[3.0], [4.0]]
    assert data.values == {"note.input_ids": len(WORDS)}


def test_silos_agree_on_its_content_wherever_it_lies(words: Path, tmp_path: Path) -> None:
    said = []
    for name in ("a", "b", "c"):
        shutil.copytree(words, tmp_path / name / "words")
        if name == "c":
            (tmp_path / name / "words" / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[UNK]"}))
        (tmp_path / name / "experiment.toml").write_text(FILE)
        said.append(agreed_parts(read(tmp_path / name / "experiment.toml")))
    assert said[0] == said[1]
    assert {name for name in said[0] if said[0][name] != said[2][name]} == {"data.columns"}


@pytest.mark.parametrize(
    ("how", "message"),
    [({"tokenizer": "words"}, "say their length in tokens"), ({"text": 0}, "lies between 1 and 65536, got 0")],
)
def test_what_a_column_cannot_be(how: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(Column(), **how)


def test_a_length_without_room_for_a_text_is_refused(words: Path) -> None:
    """Its marks are public, so it is refused whatever the texts are."""
    found = json.loads((words / "tokenizer.json").read_text())
    found["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[UNK]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"[UNK]": {"id": "[UNK]", "ids": [1], "tokens": ["[UNK]"]}},
    }
    (words / "tokenizer.json").write_text(json.dumps(found))
    tokenizer_in.cache_clear()
    tokenizer = tokenizer_in(str(words))
    assert tokenizer.encode(["the cat"], 2)["input_ids"].shape == (1, 2)
    with pytest.raises(UserError, match="no room beside the 1 marks"):
        tokenizer.encode([""], 1)
    tokenizer_in.cache_clear()


def test_a_folder_without_a_tokenizer_is_one_line(words: Path, tmp_path: Path) -> None:
    assert words
    with pytest.raises(UserError, match=r"there is no tokenizer.json in"):
        tokenizer_in(str(tmp_path))
    with pytest.raises(UserError, match=r"there is no tokenizer.json in"):
        tokenizer_digest(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="holds no tokenizer") as error:
        tokenizer_in(str(tmp_path))
    assert "\n" not in str(error.value)
