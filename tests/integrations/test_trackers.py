"""Trackers of experiments get the figures of each frame once, and a reference to the archive, no bytes."""

import json

import pytest
import torch

import inshrink_core
from inshrink_core.errors import InputError
from inshrink_core.integrations.trackers import ArchiveTracker


class Told(ArchiveTracker):
    def __init__(self, archive):
        super().__init__(archive)
        self.rows, self.about = [], []

    def _log(self, step, figures):
        self.rows.append((step, dict(figures)))

    def _refer(self, about):
        self.about.append(about)


def train(archive, tracker, steps=(10, 20), **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with inshrink_core.Saver(archive, model, optimizer, **options) as saver:
        for step in range(1, max(steps) + 1):
            loss = (model(torch.ones(8, 64)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step in steps:
                with tracker.saving(step):
                    saver.save(step)
    tracker.close()


def test_every_frame_is_told_once_with_what_an_archive_says_of_it(tmp_path):
    path = tmp_path / "a.inshrink"
    tracker = Told(path)
    assert tracker.update() == ()
    tracker.close()
    assert tracker.about == []
    train(path, tracker)
    assert tracker.update() == ()
    reported = {step: figures for step, figures in tracker.rows if "inshrink/bytes" in figures}
    waited = [step for step, figures in tracker.rows if figures.get("inshrink/save_seconds", 0) > 0]
    assert waited == [10, 20]
    archive = inshrink_core.Archive.open(path)
    assert [reported[info.step]["inshrink/bytes"] for info in archive.frames] == [
        f.nbytes for f in archive.frames
    ]
    report = inshrink_core.verbs.inspect(path).to_json()
    for frame in report["frames"]:
        assert reported[frame["step"]]["inshrink/ratio"] == frame["ratio_total"]
        assert reported[frame["step"]]["inshrink/ratio_weights"] == frame["ratio_weights"]
        assert "inshrink/restore_cost" not in reported[frame["step"]]
    (about,) = tracker.about
    assert about["uri"] == path.as_uri()
    assert about["steps"] == [10, 20]
    assert about["ratio"] == pytest.approx(about["raw_bytes"] / about["bytes"])


def test_what_was_measured_of_a_save_is_told(tmp_path):
    def check(model):
        return {"loss": float((model(torch.ones(8, 64)) - 1).square().mean())}

    tracker = Told(tmp_path / "a.inshrink")
    train(tmp_path / "a.inshrink", tracker, check=check, max_restore_cost=0.01)
    costs = [figures["inshrink/restore_cost"] for _, figures in tracker.rows if "inshrink/bytes" in figures]
    assert len(costs) == 2
    assert max(costs) <= 0.01


def test_a_save_that_fails_is_not_timed(tmp_path):
    tracker = Told(tmp_path / "a.inshrink")
    with pytest.raises(RuntimeError), tracker.saving(1):
        raise RuntimeError
    assert tracker.rows == []


@pytest.mark.integration
def test_wandb_takes_figures_and_a_reference_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs the extra 'wandb': make test-integrations")
    from inshrink_core.integrations.wandb import WandbTracker

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged = []
    with wandb.init(dir=tmp_path, project="inshrink") as run:
        tracker = WandbTracker(run, tmp_path / "a.inshrink")
        log_artifact = run.log_artifact
        monkeypatch.setattr(run, "log_artifact", lambda item: (logged.append(item), log_artifact(item))[1])
        train(tmp_path / "a.inshrink", tracker)
        summary = dict(run.summary)
    assert summary["inshrink/step"] == 20
    assert summary["inshrink/ratio"] > 1
    (artifact,) = logged
    assert artifact.metadata["steps"] == [10, 20]
    entries = artifact.manifest.entries.values()
    assert {entry.ref for entry in entries} >= {(tmp_path / "a.inshrink" / "inshrink-manifest").as_uri()}
    assert {entry.local_path for entry in entries} == {None}


@pytest.mark.integration
def test_mlflow_takes_figures_by_step_and_a_reference(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs the extra 'mlflow': make test-integrations")
    from inshrink_core.integrations.mlflow import MlflowTracker

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the skinny package has no other without a server
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with pytest.raises(InputError, match="no active run"):
        MlflowTracker(tmp_path / "a.inshrink")
    mlflow.create_experiment("saves", artifact_location=(tmp_path / "artifacts").as_uri())
    mlflow.set_experiment("saves")
    with mlflow.start_run() as run:
        train(tmp_path / "a.inshrink", MlflowTracker(tmp_path / "a.inshrink"))
    client = mlflow.MlflowClient()
    history = client.get_metric_history(run.info.run_id, "inshrink/ratio")
    assert sorted(item.step for item in history) == [10, 20]
    assert client.get_run(run.info.run_id).data.tags["inshrink.archive"].endswith("/a.inshrink")
    (document,) = (tmp_path / "artifacts").rglob("archive.json")
    assert json.loads(document.read_text())["steps"] == [10, 20]
    assert sum(file.stat().st_size for file in (tmp_path / "artifacts").rglob("*") if file.is_file()) < 2000
