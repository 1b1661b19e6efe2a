"""Metrics in any file: CSV, JSON, TensorBoard's events, and what is said of those that are none."""

import json
import struct

import google_crc32c
import pytest

from inshrink_core.errors import DamagedError, InputError, NotFoundError, RefusedLinkError
from inshrink_core.formats import read_metrics
from inshrink_core.formats.logs import log
from inshrink_core.formats.logs.event_file import scalar_rows
from inshrink_core.formats.logs.log import log_of_trainer, read_log


def _written(tmp_path, content, name="some.log"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def _varint(value):
    signs = []
    while value > 127:
        signs.append(value & 127 | 128)
        value >>= 7
    return bytes([*signs, value])


def _bytes(number, content):
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _masked(content):
    crc = google_crc32c.value(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _record(content):
    length = struct.pack("<Q", len(content))
    return length + _masked(length) + content + _masked(content)


def _event(step, *values):
    """Return a record as TensorBoard writes it: time, step, and a summary of values."""
    summary = b"".join(_bytes(1, value) for value in values)
    return _record(b"\x09" + struct.pack("<d", 1e9 + step) + b"\x10" + _varint(step) + _bytes(5, summary))


def _simple(tag, value):
    return _bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", value)


FIRST = _record(b"\x09" + struct.pack("<d", 1e9) + _bytes(3, b"brain.Event:2"))
EVENTS = FIRST + _event(10, _simple("loss", 0.5), _simple("acc", 0.25)) + _event(300, _simple("loss", 0.125))


@pytest.mark.parametrize(
    "text",
    [
        "step,loss,note\n1,0.5,a\n2,0.25,b\n",
        "step;loss\n1;0.5\n2;0.25\n",
        "\ufeffstep\tloss\n1\t0.5\n2\t0.25",
        '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n{"step": 3, "lo',
        '[{"step": 1, "loss": 0.5, "note": {}}, 7, {"step": 2, "loss": "0.25"}]',
        '{"log_history": [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]}',
    ],
)
def test_tables_of_text_are_known_by_their_content(tmp_path, text):
    found = read_metrics(_written(tmp_path, text))
    assert dict(found) == {"loss": [(1, 0.5), (2, 0.25)]}


TABLE = "Step;Grün\n1;0.5\n2;0.25\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("is_json", [False, True])
def test_the_beginning_tells_the_encoding(tmp_path, encoding, is_json):
    text = '{"Step": 1, "Grün": 0.5}\n{"Step": 2, "Grün": 0.25}\n' if is_json else TABLE
    found = read_metrics(_written(tmp_path, text.encode(encoding)))
    assert dict(found) == {"Grün": [(1, 0.5), (2, 0.25)]}


@pytest.mark.parametrize("name", ["epoch", "Epoch", "train/epoch", "_epoch", "epochs", "current_epoch"])
def test_an_epoch_is_no_metric_in_any_log_of_a_run(tmp_path, name):
    (tmp_path / "metrics.csv").write_bytes(f" step , {name}, loss_epoch\n1,0,0.5\n".encode("utf-16"))
    assert dict(read_log(tmp_path)) == {"loss_epoch": [(1, 0.5)]}
    (tmp_path / "metrics.csv").unlink()
    row = {"step": 1, name: 0.1, "loss_epoch": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row))
    assert dict(read_log(tmp_path)) == {"loss_epoch": [(1, 0.5)]}
    assert dict(log_of_trainer(json.dumps({"log_history": [row]}).encode(), "x")) == {
        "loss_epoch": [(1, 0.5)]
    }
    assert dict(read_metrics(tmp_path / "metrics.jsonl")) == {"loss_epoch": [(1, 0.5)]}


def test_the_step_is_guessed_and_counters_and_times_are_no_metrics(tmp_path):
    text = "Wall time,trainer/global_step,epoch,val/loss,f1\n1e9,10,0,0.5,0.1\n2e9,20,1,0.25,0.2\n"
    found = read_metrics(_written(tmp_path, text))
    assert dict(found) == {"val/loss": [(10, 0.5), (20, 0.25)], "f1": [(10, 0.1), (20, 0.2)]}
    assert found.origin == str(tmp_path / "some.log")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "called like a step"),
        ("0.5,1\n0.25,1\n", "called like a step"),
        ("10,0.5\n20,0.25\n", "called like a step"),
        ("epoch,b\n0.5,2\n", "fractions"),
        ("step,b\n,2\n1,\n", "no row has a metric"),
    ],
)
def test_a_file_without_metrics_by_step_is_refused(tmp_path, text, said):
    with pytest.raises(InputError, match=said):
        read_metrics(_written(tmp_path, text))


@pytest.mark.parametrize("content", ["", "only words\n", "{", "[1, 2]", "PK\x03\x04", b"\xff\x00" * 99])
def test_what_has_no_numbers_is_no_file_of_metrics(tmp_path, content):
    with pytest.raises(InputError, match="no metrics"):
        read_metrics(_written(tmp_path, content))


def test_only_a_file_of_bearable_size_in_its_own_folder_is_read(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to(_written(tmp_path, "step,b\n1,2\n"))
    with pytest.raises(RefusedLinkError):
        read_metrics(tmp_path / "in" / "link")
    with pytest.raises(NotFoundError):
        read_metrics(tmp_path / "in")
    monkeypatch.setattr(log, "_MAX_TEXT_BYTES", 5)
    with pytest.raises(InputError, match="more than"):
        read_metrics(tmp_path / "some.log")
    monkeypatch.setattr(log, "MAX_JSON_BYTES", 5)
    with pytest.raises(DamagedError, match="too large"):
        read_metrics(tmp_path / "some.log")


def test_scalars_of_an_event_file_are_read_by_step_and_tag(tmp_path):
    found = read_metrics(_written(tmp_path, EVENTS, "events.out.tfevents.1.host"))
    assert dict(found) == {"loss": [(10, 0.5), (300, 0.125)], "acc": [(10, 0.25)]}


def test_a_tail_that_is_cut_off_is_left_out():
    whole = scalar_rows(EVENTS)
    for end in range(len(EVENTS) - 1, len(EVENTS) - 20, -1):
        assert scalar_rows(EVENTS[:end]) == whole[:-1]
    assert scalar_rows(EVENTS + b"\x01" * 5) == whole


def test_a_flipped_bit_costs_one_record_or_what_follows():
    whole = scalar_rows(EVENTS)
    for position in range(len(FIRST), len(EVENTS)):
        damaged = bytearray(EVENTS)
        damaged[position] ^= 1
        rows = scalar_rows(bytes(damaged))
        assert len(rows) < len(whole)
        assert all(row in whole for row in rows)


@pytest.mark.parametrize(
    "message", [b"\x2a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x2a\x7f", b"\x0b", b"\x09\x00"]
)
def test_messages_that_are_none_are_left_out(message):
    assert len(scalar_rows(_record(message) + EVENTS)) == 2
