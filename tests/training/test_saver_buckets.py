"""Savers whose archive lies in a bucket: spooled and made here, uploaded behind the training."""

import pytest

import inshrink_core
from inshrink_core.archive.storage import uploads
from inshrink_core.errors import ConflictError, InputError, StorageError
from inshrink_core.training.spool import spool_folder

pytest.importorskip("obstore", reason="the extra 'remote' is not installed")
from obstore.exceptions import GenericError

from tests.archive.test_objects import bucket, store, url  # noqa: F401 - fixtures
from tests.runs import adam, model, train


def training():
    network = model()
    return network, adam(network)


def offline(verb, key):
    raise GenericError("HTTP error: error sending request")


def test_a_saver_saves_into_a_bucket_and_restores_from_it(url):  # noqa: F811
    network, optimizer = training()
    with inshrink_core.Saver(url, network, optimizer, codec="lossless", optimizer_state="exact") as saver:
        for step in (1, 2, 3):
            train(network, optimizer, range(step, step + 1))
            saver.save(step, {"loss": 1.0})
        saver.flush(remote=True)
        assert inshrink_core.open(url).steps == (1, 2, 3)
        assert saver.path == url
    again, other = training()
    with inshrink_core.Saver(url, again, other, codec="lossless", optimizer_state="exact") as saver:
        assert saver.restore() == 3
        assert saver.extra == {"loss": 1.0}
        losses = train(again, other, range(4, 8))
        saver.save(4)
    assert losses == train(network, optimizer, range(4, 8))
    assert inshrink_core.open(url).steps == (1, 2, 3, 4)
    assert not spool_folder(url).exists()


def test_training_goes_on_while_the_bucket_cannot_be_reached(url, store):  # noqa: F811
    network, optimizer = training()
    with inshrink_core.Saver(url, network, optimizer) as saver:
        saver.save(0)
        saver.flush(remote=True)
        store.before = offline
        for step in range(1, 6):
            train(network, optimizer, range(step, step + 1))
            saver.save(step)
        saver.flush()
        assert saver.failures == {}
        with pytest.raises(StorageError, match="not everything is uploaded yet"):
            saver.flush(remote=True)
        store.before = lambda verb, key: None
        saver.flush(remote=True)
    assert inshrink_core.open(url).steps == (0, 1, 2, 3, 4, 5)


def test_a_saver_that_another_machine_overtook_stops(url, monkeypatch, tmp_path):  # noqa: F811
    network, optimizer = training()
    saver = inshrink_core.Saver(url, network, optimizer)
    saver.save(1)
    saver.flush(remote=True)
    with monkeypatch.context() as patched:
        patched.setenv(uploads.QUEUE_VARIABLE, str(tmp_path / "elsewhere"))
        with inshrink_core.Saver(url, network, optimizer) as other:
            other.save(2)
    saver.save(3)
    with pytest.raises(ConflictError):
        saver.flush(remote=True)
    saver.save(4)
    with pytest.raises(ConflictError):
        saver.flush()
    with pytest.raises(ConflictError):
        saver.close()
    assert inshrink_core.open(url).steps == (1, 2)


def test_files_are_not_written_to_an_address_as_to_a_folder(url, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    network, optimizer = training()
    with inshrink_core.Saver(url, network, optimizer) as saver:
        saver.save(1)
    for write in (
        lambda: inshrink_core.restore(url, "s3://bucket/out"),
        lambda: inshrink_core.verbs.export(url, "s3://bucket/model.inshrink"),
    ):
        with pytest.raises(InputError, match="local or mounted"):
            write()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("s3")]
    assert uploads.queue_folder(url).is_relative_to(tmp_path)
